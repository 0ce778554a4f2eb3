"""Compare this solver's plans with those of other methods, on the same measurements, all simulated exactly.

For each method, this solver plans for the iteration time that the method's own plan takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perseus_solver.comparison import baselines
from perseus_solver.errors import Infeasible, InvalidProblem, SolverError
from perseus_solver.frontier import Planner
from perseus_solver.kinds import Floats, latest_s
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Point
from perseus_solver.model.simulator import Choice, Simulator


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one method.

    Attributes:
        name: the method.
        iteration_time_s, energy_j: exact figures of its plan; None: it has no plan, and `note` says why.
        ours: this solver's plan for at most that time.
        note: a remark; empty if there is none.
    """

    name: str
    iteration_time_s: float | None = None
    energy_j: float | None = None
    ours: Point | None = None
    note: str = ""


Method = Callable[[], Choice]


def compare(problem: Problem, *, deadline_s: float | None = None, lowtime_unit_s: float | None = None) -> list[Row]:
    """Plan with every method, all clocks at their maximum first.

    Args:
        problem: the problem to plan.
        deadline_s: deadline for the methods that accept one, seconds; None: the time of all clocks at their maximum, so
            no slowdown.
        lowtime_unit_s: also run lowtime, with this time grid in seconds; None: do not.

    Returns:
        One row for each method.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        InvalidProblem: the problem is no pipeline, for which alone the other methods are defined.
    """
    if problem.names is not None:
        raise InvalidProblem("other methods are defined for pipelines, not for any graph")
    simulator = Simulator(problem)
    maximum = baselines.all_maximum(problem)
    limit_s = float(simulator.run(maximum).iteration_time_s) if deadline_s is None else deadline_s
    methods: list[tuple[str, Method]] = [
        ("all-maximum", lambda: maximum),
        ("best single frequency", lambda: baselines.best_single_clock(simulator, limit_s)),
        ("EnvPipe's heuristic", lambda: baselines.envpipe(simulator)),
        ("lowtime", lambda: _lowtime(simulator, limit_s, lowtime_unit_s)),
    ]
    planner = Planner(problem)
    if latest_s(limit_s) < planner.t_min_s:
        raise Infeasible(limit_s, planner.t_min_s)
    return [_row(simulator, planner, name, method) for name, method in methods]


def _row(simulator: Simulator, planner: Planner, name: str, method: Method) -> Row:
    try:
        run = simulator.run(method())
    except SolverError as error:
        return Row(name=name, note=str(error))
    time_s = float(run.iteration_time_s)
    return Row(name=name, iteration_time_s=time_s, energy_j=float(run.energy_j), ours=planner.plan(time_s))


def _lowtime(simulator: Simulator, deadline_s: float, unit_s: float | None) -> Choice:
    """Return lowtime's plan of least energy that meets the deadline, or its fastest where none does."""
    from perseus_solver.comparison import lowtime_peer

    if unit_s is None:
        raise lowtime_peer.PeerFailed("not run, because it takes minutes; use --lowtime")
    lowtime_peer.check_installed()
    plans = np.array(list(lowtime_peer.lowtime_plans(simulator.problem, unit_time_s=unit_s)))
    time_s, energy_j = simulator.totals(plans)
    fits = np.flatnonzero(time_s <= latest_s(deadline_s))
    best = fits[np.argmin(energy_j[fits])] if fits.size else np.argmin(time_s)
    plan: Choice = plans[best]
    return plan


def single_clocks(simulator: Simulator) -> tuple[Floats, Floats]:
    """Return time and energy of every plan with one clock for all instructions.

    Args:
        simulator: of the problem.

    Returns:
        float[clocks] seconds and float[clocks] joules.
    """
    problem = simulator.problem
    plans = [baselines.at_clock(problem, clock) for clock in baselines.common_clocks(problem)]
    return simulator.totals(np.array(plans or [baselines.all_maximum(problem)]))


def as_table(rows: list[Row]) -> str:
    """Return the comparison as text.

    Each row has the time and energy of a method against all-maximum, and this solver's energy for no more time.
    """
    base = rows[0]
    assert base.iteration_time_s is not None
    assert base.energy_j is not None
    lines = [
        f"{'':22}{'time':>10}{'':>9}{'energy':>12}{'saving':>9}   {'this solver':>12}{'saving':>9}{'gap':>9}",
        f"{'':22}{'s':>10}{'%':>9}{'J':>12}{'%':>9}   {'J':>12}{'%':>9}{'%':>9}",
    ]
    for row in rows:
        if row.iteration_time_s is None or row.energy_j is None or row.ours is None:
            lines.append(f"{row.name:22}{'–':>10}   {row.note}")
            continue
        slower = round(100 * (row.iteration_time_s / base.iteration_time_s - 1), 2) + 0.0  # no "-0.00"
        lines.append(
            f"{row.name:22}{row.iteration_time_s:10.4f}{slower:+9.2f}{row.energy_j:12.1f}"
            f"{100 * (1 - row.energy_j / base.energy_j):9.2f}   {row.ours.energy_j:12.1f}"
            f"{100 * (1 - row.ours.energy_j / base.energy_j):9.2f}{100 * row.ours.gap:9.3f}"
        )
    return "\n".join(lines)


def as_json(rows: list[Row]) -> bytes:
    """Return the comparison as JSON: a list of methods; null where a method has no plan, and ``note`` says why."""

    def figures(time_s: float | None, energy_j: float | None) -> dict[str, float | None]:
        return {"iteration_time_s": time_s, "energy_j": energy_j}

    return json.dumps(
        [
            {"name": row.name, "note": row.note, **figures(row.iteration_time_s, row.energy_j)}
            | {"ours": row.ours and figures(row.ours.iteration_time_s, row.ours.energy_j) | {"gap": row.ours.gap}}
            for row in rows
        ],
        indent=1,
    ).encode()

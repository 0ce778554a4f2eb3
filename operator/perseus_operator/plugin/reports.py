"""What the plugin answers, as documents: the frontier, one plan, and why a plan is in force. Pure.

Called by ``cli`` for every output format; ``tables`` turns the documents into text. Energy and power are of all GPUs of
the job; fields are named like those of a PerseusJob's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.job import Mode, ObjectiveType
from perseus_operator.errors import CannotAnswer
from perseus_operator.formatting import percent, seconds
from perseus_operator.objects import Json
from perseus_operator.planning.power_allocation import replicas_of
from perseus_operator.plugin.job import Facts
from perseus_proto.units import mj_from_j, us_from_s
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.kinds import Kind
from perseus_solver.model.simulator import Simulator


def frontier_document(facts: Facts) -> Json:
    """Every plan of the frontier, fastest first, and every GPU at its highest clock for comparison."""
    frontier, highest = facts.frontier, _all_at_maximum(facts, {})
    points = []
    for index, point in enumerate(frontier):
        figures = _figures(point.iteration_time_s, replicas_of(facts.spec) * point.energy_j)
        points.append(
            {
                "point": index,
                **figures,
                "slowdown": percent(point.iteration_time_s / frontier.t_min_s - 1),
                **({} if highest is None else {"saved": _saved(figures, highest)}),
                "gapPartsPerMillion": round(max(0.0, point.gap) * 1e6),
                "clockChanges": point.clock_changes,
            }
        )
    return {
        "job": f"{facts.namespace}/{facts.name}",
        "pointInForce": facts.point,
        "allAtMaximum": highest,
        **({"note": facts.simulator} if isinstance(facts.simulator, str) else {}),
        "points": points,
    }


def plan_document(facts: Facts, point: int | None) -> Json:
    """The clock of every instruction of one plan; None: of the plan in force.

    Raises:
        CannotAnswer: no plan is in force, there is no such point, or the instructions cannot be named.
    """
    if point is None:
        point = facts.point
        if point is None:
            said = facts.condition(ConditionType.PLAN_APPLIED)
            why = f"{said['reason']}: {said['message']}" if said else "the operator has said nothing yet"
            raise CannotAnswer(f"{facts.namespace}/{facts.name} runs no plan: {why} (--point N shows any other plan)")
    frontier = facts.frontier
    if not 0 <= point < len(frontier):
        raise CannotAnswer(f"--point: the frontier has points 0 to {len(frontier) - 1}, not {point}")
    if isinstance(facts.simulator, str):
        raise CannotAnswer(f"the plan's instructions cannot be named: {facts.simulator}")
    order, plan = facts.simulator.problem.schedule, frontier[point]
    stages = []
    for stage, (first, last) in enumerate(pairwise(frontier.stage_offset.tolist())):
        clocks = plan.frequencies_mhz[first:last].tolist()
        names = zip(order.kind[first:last], order.microbatch[first:last], order.chunk[first:last], clocks, strict=True)
        stages.append(
            {
                "stage": stage,
                "clockChanges": _changes(clocks),
                "instructions": [
                    {"kind": Kind(int(kind)).label, "microbatch": int(m), "chunk": int(c), "megahertz": int(clock)}
                    for kind, m, c, clock in names
                ],
            }
        )
    return {
        "job": f"{facts.namespace}/{facts.name}",
        "point": point,
        "inForce": point == facts.point,
        **_figures(plan.iteration_time_s, replicas_of(facts.spec) * plan.energy_j),
        "clockChanges": plan.clock_changes,
        "stages": stages,
        "stragglers": list(facts.status.get("stragglers", ())),
    }


def explanation(facts: Facts) -> Json:
    """Why this plan, what it costs and what it saves."""
    status, frontier = facts.status, facts.frontier
    slowdowns = {int(s["dataParallelRank"]): 1 + _share(s["slowdown"]) for s in status.get("stragglers", ())}
    highest = _all_at_maximum(facts, slowdowns)
    rows = {
        "all at maximum clocks": highest,
        "predicted": _with_power(status.get("predicted")),
        "measured": _with_power(status.get("measured")),
        "measured at default clocks": _with_power(status.get("baseline")),
    }
    saves: Json = {}
    if highest is not None and rows["predicted"]:
        saves["predicted"] = {
            "energy": _saved(rows["predicted"], highest),
            "slowdown": _slowdown(rows["predicted"], highest),
            "against": "all at maximum clocks",
        }
    if "savings" in status:
        saves["measured"] = {**status["savings"], "against": "measured at default clocks"}
    point = facts.point
    return {
        "job": f"{facts.namespace}/{facts.name}",
        "mode": facts.spec.mode.value,
        "point": point,
        "points": len(frontier),
        **({"fromIteration": status["plan"]["fromIteration"]} if point is not None else {}),
        "why": [{"what": what, "says": says} for what, says in _why(facts, slowdowns) if says],
        "figures": {name: figures for name, figures in rows.items() if figures is not None},
        "saves": saves,
        **({} if point is None else {"gapPartsPerMillion": round(max(0.0, float(frontier.gap[point])) * 1e6)}),
        **({"note": facts.simulator} if isinstance(facts.simulator, str) else {}),
    }


def _why(facts: Facts, slowdowns: Mapping[int, float]) -> list[tuple[str, str]]:
    applied, bound = facts.condition(ConditionType.PLAN_APPLIED), facts.condition(ConditionType.BOUND_KEPT)
    waiting = "" if applied.get("status") == "True" else f"{applied.get('reason')}: {applied.get('message')}"
    return [
        ("objective", _objective(facts)),
        ("no plan in force" if facts.spec.mode is Mode.ENFORCE else "mode", waiting),
        ("straggler", _stragglers(facts, slowdowns)),
        ("guard", str(bound.get("message", "")) if bound.get("reason") != "NoBound" else ""),
        ("in force", str(applied.get("message", "")) if applied.get("status") == "True" else ""),
    ]


def _objective(facts: Facts) -> str:
    objective, t_min_us = facts.spec.objective, us_from_s(facts.frontier.t_min_s)
    fastest = f"the fastest iteration is T_min = {seconds(t_min_us)}"
    least_us = us_from_s(float(facts.frontier.time_s[facts.frontier.least_energy]))
    kind = objective.type.value
    if objective.max_slowdown_ratio is not None:
        allowed = seconds(t_min_us * (1 + objective.max_slowdown_ratio))
        return f"{kind} {objective.max_slowdown}: {fastest}, so one may take {allowed}"
    if objective.power_cap_watts is not None:
        return f"{kind}: the fastest plan of at most {objective.power_cap_watts} W; {fastest}"
    if objective.type is ObjectiveType.MIN_ENERGY:
        return f"{kind}: the least energy of all is at {seconds(least_us)}; {fastest}"
    if objective.deadline is not None:
        wanted = objective.deadline
        if wanted.iteration_time_microseconds is not None:
            return f"{kind}: an iteration may take {seconds(wanted.iteration_time_microseconds)}; {fastest}"
        return f"{kind}: {wanted.iterations} iterations by {wanted.finish_by}; {fastest}"
    return f"{kind}: no slowdown; {fastest}"


def _stragglers(facts: Facts, slowdowns: Mapping[int, float]) -> str:
    if not slowdowns:
        return ""
    t_min_us, t_star_us = us_from_s(facts.frontier.t_min_s), us_from_s(facts.frontier.t_star_s)
    last_us = max(slowdowns.values()) * t_min_us
    until = f"T* = {seconds(t_star_us)}: slower saves nothing" if last_us > t_star_us else "then"
    named = ", ".join(
        f"pipeline {s['dataParallelRank']} is {s['slowdown']} slower ({s['source'].lower()})"
        for s in facts.status["stragglers"]
    )
    return f"{named}; an iteration ends at T' = {seconds(last_us)}, and the others have until {until}"


def _all_at_maximum(facts: Facts, slowdowns: Mapping[int, float]) -> Json | None:
    """Every GPU at its highest clock; the early pipelines wait at blocking power for the last."""
    if not isinstance(facts.simulator, Simulator):
        return None
    problem = facts.simulator.problem
    run = facts.simulator.run(all_maximum(problem))
    pipelines = facts.spec.pipeline.data_parallel
    times_s = np.array([slowdowns.get(p, 1.0) for p in range(pipelines)]) * float(run.iteration_time_s)
    waiting_s = float((times_s.max() - times_s).sum())
    energy_j = pipelines * float(run.energy_j) + problem.stages * problem.blocking_power_w * waiting_s
    return _figures(float(times_s.max()), facts.spec.pipeline.tensor_parallel * energy_j)


def _figures(time_s: float, energy_j: float) -> Json:
    return {
        "iterationTimeMicroseconds": us_from_s(time_s),
        "energyMillijoules": mj_from_j(energy_j),
        "powerWatts": round(energy_j / time_s),
    }


def _with_power(figures: Mapping[str, Any] | None) -> Json | None:
    if figures is None or "energyMillijoules" not in figures or not figures["iterationTimeMicroseconds"]:
        return None if figures is None else dict(figures)
    # mJ / µs = kW
    power_w = 1000 * figures["energyMillijoules"] / figures["iterationTimeMicroseconds"]
    return {**figures, "powerWatts": round(power_w)}


def _saved(figures: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    if "energyMillijoules" not in figures:
        return "unknown"
    return percent(1 - figures["energyMillijoules"] / reference["energyMillijoules"])


def _slowdown(figures: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    return percent(figures["iterationTimeMicroseconds"] / reference["iterationTimeMicroseconds"] - 1)


def _changes(clocks_mhz: list[int]) -> int:
    """Changes in one iteration of a steady run: the last instruction is followed by the first. Constant-time work asks
    for no clock.
    """
    asked = [clock for clock in clocks_mhz if clock]
    return sum(a != b for a, b in pairwise([*asked, asked[0]])) if asked else 0


def _share(text: str) -> float:
    return float(text.rstrip("%")) / 100

"""The page's JSON: all jobs, one job with its frontier, one plan as a timetable; all pools, and one pool.

Energy is of the whole job: all pipelines and tensor ranks. Times are of one iteration.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.api.schema import dump
from perseus_operator.controller.view import JobView, PoolView
from perseus_operator.families.serving.status.explanation import pool_explanation, pool_listing
from perseus_operator.families.training.features.power.plans import replicas_of
from perseus_operator.families.training.status.unmeasured import why_unmeasured
from perseus_operator.objects.values import Json
from perseus_solver.comparison.baselines import all_maximum

MAX_DRAWN: Final = 6_000
"""Instructions of the largest plan that is drawn: more would slow the browser and exceed the columns of a screen."""


class NotThere(Exception):
    """No such job or plan, or it cannot be drawn; the message says which."""


def overview(views: Iterable[JobView]) -> Json:
    """List every job in short form, by namespace and name."""
    return {"jobs": [_line(view) for view in sorted(views, key=lambda view: (view.ref.namespace, view.ref.name))]}


def job_document(view: JobView) -> Json:
    """Describe one job: status, and its frontier in seconds and joules if there is one."""
    status = view.status
    document: Json = {
        **_line(view),
        "spec": None if view.spec is None else dump(view.spec),
        "conditions": list(status.get("conditions", ())),
        "plan": status.get("plan"),
        "hardware": status.get("hardware"),
        "guard": status.get("guard"),
        "predicted": status.get("predicted"),
        "measured": status.get("measured"),
        "baseline": status.get("baseline"),
        "stragglers": list(status.get("stragglers", ())),
        "frontier": None,
    }
    if view.solved is not None and view.spec is not None:
        document["frontier"] = _frontier(view)
    return document


def pools_overview(views: Iterable[PoolView]) -> Json:
    """List every pool in short form, by namespace and name."""
    return {"pools": pool_listing(view.stored for view in views)["pools"]}


def pool_document(view: PoolView) -> Json:
    """Describe one pool: what it does and why, as ``pool_explanation``, with its conditions."""
    status = view.stored.get("status") or {}
    return {**pool_explanation(view.stored), "conditions": list(status.get("conditions", ()))}


def plan_document(view: JobView, point: int) -> Json:
    """Describe one plan as a timetable.

    Returns:
        For each stage its instructions as [kind, microbatch, chunk, start s, time s, MHz, W].

    Raises:
        NotThere: the job has no frontier yet, no such point, or too many instructions to draw.
    """
    solved = view.solved
    if solved is None:
        raise NotThere("the job has no frontier yet")
    if not 0 <= point < len(solved.frontier):
        raise NotThere(f"the frontier has points 0 to {len(solved.frontier) - 1}")
    clocks_mhz = solved.frontier.frequencies_mhz[point]
    if clocks_mhz.size > MAX_DRAWN:
        raise NotThere(f"a plan of {clocks_mhz.size} instructions is not drawn; at most {MAX_DRAWN} are")
    simulator = solved.planned_times.simulator
    problem, schedule = simulator.problem, simulator.problem.schedule
    choice = simulator.choice_of(clocks_mhz)
    run, time_s = simulator.run(choice), simulator.duration_s(choice)
    power_w = simulator.instruction_energy_j(choice) / time_s
    columns = (schedule.kind, schedule.microbatch, schedule.chunk, run.start_s, time_s, clocks_mhz, power_w)
    rows = [list(row) for row in zip(*(np.asarray(column).tolist() for column in columns), strict=True)]
    for row in rows:
        row[0] = InstructionKind(row[0]).label
    offsets = problem.stage_offset.tolist()
    return {
        "point": point,
        "iterationSeconds": float(run.iteration_time_s),
        "blockingWatts": problem.blocking_power_w,
        # The same for every plan of the job, so that colours can be compared.
        "highestWatts": max(float((table.energy_j / table.time_s).max()) for table in problem.options),
        "stages": [rows[first:last] for first, last in pairwise(offsets)],
    }


def _line(view: JobView) -> Json:
    ready: Json = next((c for c in view.status.get("conditions", ()) if c.get("type") == "Ready"), {})
    return {
        "namespace": view.ref.namespace,
        "name": view.ref.name,
        "ready": ready.get("status", "Unknown"),
        "reason": ready.get("reason", ""),
        "objective": "" if view.spec is None else view.spec.objective.type.value,
        "savings": view.status.get("savings"),
        "unmeasured": _unmeasured(view, ready),
        "stragglerCount": len(view.status.get("stragglers", ())),
    }


def _unmeasured(view: JobView, ready: Json) -> str:
    """Why it is not known what the plan saves; empty: it is."""
    if view.status.get("savings") is not None:
        return ""
    if ready.get("status") != "True" or view.spec is None:
        return str(ready.get("message", ""))
    if view.spec.objective.type is ObjectiveType.FIXED_CLOCK:
        return "Iterations of a job with a fixed clock are not measured."
    return why_unmeasured(view.spec, view.status)


def _frontier(view: JobView) -> Json:
    assert view.solved is not None
    assert view.spec is not None
    frontier, replicas = view.solved.frontier, replicas_of(view.spec)
    simulator = view.solved.planned_times.simulator
    default = simulator.run(all_maximum(simulator.problem))
    return {
        "digest": view.solved.view.digest,
        "seconds": frontier.time_s.tolist(),
        "joules": (replicas * frontier.energy_j).tolist(),
        "gaps": np.maximum(frontier.gap, 0.0).tolist(),
        # What the hardware costs is then in the energies and not in the bound.
        "rehearsed": frontier.rehearsed is not None,
        "leastEnergyPoint": int(frontier.least_energy),
        "gpus": replicas * frontier.stages,
        "highestClocks": {"seconds": float(default.iteration_time_s), "joules": replicas * float(default.energy_j)},
    }

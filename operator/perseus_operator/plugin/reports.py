"""The plugin's answers as documents: the frontier, one plan, and why a plan is in force.

A document is what ``--output json`` prints; the table output is made from the same document. Energy and power are of
all GPUs of the job; fields are named like those of a PerseusJob's status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_core.units import mean_power_w, mj_from_j, us_from_s
from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.job import Mode
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.errors import CannotAnswer
from perseus_operator.families.training.features.bound.guard import TOLERANCE
from perseus_operator.families.training.features.power.plans import replicas_of
from perseus_operator.objects.formatting import exact_percent, megahertz, milliseconds, percent, seconds
from perseus_operator.objects.values import Json
from perseus_operator.plugin.job import PlannedJob
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.model.simulator import Simulator


def frontier_document(job: PlannedJob) -> Json:
    """Report every plan of the frontier, fastest first, and every GPU at its highest clock for comparison.

    Args:
        job: with its frontier.

    Returns:
        Times in microseconds, energies in millijoules, powers in watts; ``saved`` only if the profile could be read.
    """
    frontier, highest = job.frontier, _all_at_maximum(job, {})
    points = []
    for index, point in enumerate(frontier):
        figures = _figures(point.iteration_time_s, replicas_of(job.spec) * point.energy_j)
        points.append(
            {
                "point": index,
                **figures,
                "slowdown": percent(point.iteration_time_s / frontier.t_min_s - 1),
                **({} if highest is None else {"saved": _saved(figures, highest)}),
                "gap": exact_percent(max(0.0, point.gap)),
                "clockChanges": point.clock_changes,
                **({} if frontier.rehearsed is None else {"grain": frontier.rehearsed.grains[index].label}),
            }
        )
    return {
        "job": f"{job.namespace}/{job.name}",
        "pointInForce": job.point,
        "allAtMaximum": highest,
        **({"note": job.simulator} if isinstance(job.simulator, str) else {}),
        "points": points,
    }


def plan_document(job: PlannedJob, point: int | None) -> Json:
    """Report the clock of every instruction of one plan.

    Args:
        job: with its frontier.
        point: which plan; None: the plan in force.

    Returns:
        For each stage its instructions in order with their clocks in MHz, 0 where no clock is requested.

    Raises:
        CannotAnswer: no plan is in force, there is no such point, or the instructions cannot be named.
    """
    if point is None:
        point = job.point
        if point is None:
            applied = job.condition(ConditionType.PLAN_APPLIED)
            why = f"{applied['reason']}: {applied['message']}" if applied else "the operator has not reported on it yet"
            raise CannotAnswer(f"{job.namespace}/{job.name} runs no plan: {why} (--point N shows any other plan)")
    frontier = job.frontier
    if not 0 <= point < len(frontier):
        raise CannotAnswer(f"--point: the frontier has points 0 to {len(frontier) - 1}, not {point}")
    if isinstance(job.simulator, str):
        raise CannotAnswer(f"the plan's instructions cannot be named: {job.simulator}")
    schedule, plan = job.simulator.problem.schedule, frontier[point]
    stages = []
    for stage, (first, last) in enumerate(pairwise(frontier.stage_offset.tolist())):
        clocks = plan.frequencies_mhz[first:last].tolist()
        names = zip(
            schedule.kind[first:last], schedule.microbatch[first:last], schedule.chunk[first:last], clocks, strict=True
        )
        stages.append(
            {
                "stage": stage,
                "clockChanges": _changes(clocks),
                "instructions": [
                    {
                        "kind": InstructionKind(int(kind)).label,
                        "microbatch": int(m),
                        "chunk": int(c),
                        "megahertz": int(clock),
                    }
                    for kind, m, c, clock in names
                ],
            }
        )
    return {
        "job": f"{job.namespace}/{job.name}",
        "point": point,
        "inForce": point == job.point,
        **_figures(plan.iteration_time_s, replicas_of(job.spec) * plan.energy_j),
        "clockChanges": plan.clock_changes,
        "stages": stages,
        "stragglers": list(job.status.get("stragglers", ())),
    }


def explanation(job: PlannedJob) -> Json:
    """Report why the plan is in force, its time and energy, and what it saves.

    Args:
        job: with its frontier.

    Returns:
        ``why`` as sentences by subject, ``figures`` by source, and ``saves`` as predicted and as measured.
    """
    status, frontier = job.status, job.frontier
    slowdowns = {int(s["dataParallelRank"]): 1 + _share(s["slowdown"]) for s in status.get("stragglers", ())}
    highest = _all_at_maximum(job, slowdowns)
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
        compared = status["savings"].get("against") == "Comparisons"
        against = "default clocks, compared while it runs" if compared else "measured at default clocks"
        saves["measured"] = {**status["savings"], "against": against}
    point = job.point
    return {
        "job": f"{job.namespace}/{job.name}",
        "mode": job.spec.mode.value,
        "point": point,
        "points": len(frontier),
        **({"fromIteration": status["plan"]["fromIteration"]} if point is not None else {}),
        "why": [{"what": what, "says": says} for what, says in _why(job, slowdowns) if says],
        "figures": {name: figures for name, figures in rows.items() if figures is not None},
        "saves": saves,
        **({} if point is None else {"gap": exact_percent(max(0.0, float(frontier.gap[point])))}),
        **({"note": job.simulator} if isinstance(job.simulator, str) else {}),
    }


def _why(job: PlannedJob, slowdowns: Mapping[int, float]) -> list[tuple[str, str]]:
    applied, bound = job.condition(ConditionType.PLAN_APPLIED), job.condition(ConditionType.BOUND_KEPT)
    waiting = "" if applied.get("status") == "True" else f"{applied.get('reason')}: {applied.get('message')}"
    return [
        ("objective", _objective(job)),
        ("GPUs", _hardware(job)),
        ("clocks", str((job.status.get("plan") or {}).get("reason", ""))),
        ("no plan in force" if job.spec.mode is Mode.ENFORCE else "mode", waiting),
        ("straggler", _stragglers(job, slowdowns)),
        ("guard", str(bound.get("message", "")) if bound.get("reason") != "NoBound" else ""),
        ("in force", str(applied.get("message", "")) if applied.get("status") == "True" else ""),
    ]


def _hardware(job: PlannedJob) -> str:
    hardware = job.status.get("hardware")
    if hardware is None:
        return ""
    median_us, worst_us = hardware["switchLatencyMedianMicroseconds"], hardware["switchLatencyP99Microseconds"]
    lead_us = hardware.get("medianLeadMicroseconds")
    lead = "" if lead_us is None else f", {milliseconds(lead_us)} before the GPU in the median"
    return (
        f"{hardware['gpu']}; clock changes take {milliseconds(median_us)} (99 %: {milliseconds(worst_us)},"
        f" {hardware['source']}){_by_clock(hardware.get('clocks') or ())}; marks: {hardware['marks'].lower()}{lead}"
    )


def _by_clock(clocks: Sequence[Mapping[str, int]]) -> str:
    """How far changes differ by the clock that is changed to; empty: that is not known yet."""
    if not clocks:
        return ""
    ordered = sorted(clocks, key=lambda one: one["medianMicroseconds"])
    said = [f"{milliseconds(one['medianMicroseconds'])} to {megahertz(one['megahertz'])}" for one in ordered]
    if len(said) == 1:
        return f", {said[0]}"
    return f", from {said[0]} up to {said[-1]}"


def _objective(job: PlannedJob) -> str:
    objective, t_min_us = job.spec.objective, us_from_s(job.frontier.t_min_s)
    fastest = f"the fastest iteration is T_min = {seconds(t_min_us)}"
    least_us = us_from_s(float(job.frontier.time_s[job.frontier.least_energy]))
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
    planned = str((job.status.get("plan") or {}).get("plannedSlowdown", "0.00%"))
    within = 0 < _share(planned) <= TOLERANCE
    noise = f"; that in force is {planned} slower, within the {percent(TOLERANCE)} taken for noise" if within else ""
    return f"{kind}: no slowdown; {fastest}{noise}"


def _stragglers(job: PlannedJob, slowdowns: Mapping[int, float]) -> str:
    if not slowdowns:
        return ""
    t_min_us, t_star_us = us_from_s(job.frontier.t_min_s), us_from_s(job.frontier.t_star_s)
    last_us = max(slowdowns.values()) * t_min_us
    until = f"T* = {seconds(t_star_us)}: slower saves nothing" if last_us > t_star_us else "then"
    named = ", ".join(
        f"pipeline {s['dataParallelRank']} is {s['slowdown']} slower ({s['source'].lower()})"
        for s in job.status["stragglers"]
    )
    return f"{named}; an iteration ends at T' = {seconds(last_us)}, and the others have until {until}"


def _all_at_maximum(job: PlannedJob, slowdowns: Mapping[int, float]) -> Json | None:
    """Return the figures with every GPU at its highest clock; pipelines that finish early wait at blocking power."""
    if not isinstance(job.simulator, Simulator):
        return None
    problem = job.simulator.problem
    run = job.simulator.run(all_maximum(problem))
    pipelines = job.spec.pipeline.data_parallel
    times_s = np.array([slowdowns.get(p, 1.0) for p in range(pipelines)]) * float(run.iteration_time_s)
    waiting_s = float((times_s.max() - times_s).sum())
    energy_j = pipelines * float(run.energy_j) + problem.stages * problem.blocking_power_w * waiting_s
    return _figures(float(times_s.max()), job.spec.pipeline.tensor_parallel * energy_j)


def _figures(time_s: float, energy_j: float) -> Json:
    return {
        "iterationTimeMicroseconds": us_from_s(time_s),
        "energyMillijoules": mj_from_j(energy_j),
        "powerWatts": round(energy_j / time_s),
    }


def _with_power(figures: Mapping[str, Any] | None) -> Json | None:
    if figures is None or "energyMillijoules" not in figures or not figures["iterationTimeMicroseconds"]:
        return None if figures is None else dict(figures)
    power_w = mean_power_w(figures["energyMillijoules"], figures["iterationTimeMicroseconds"])
    return {**figures, "powerWatts": round(power_w)}


def _saved(figures: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    if "energyMillijoules" not in figures:
        return "unknown"
    return percent(1 - figures["energyMillijoules"] / reference["energyMillijoules"])


def _slowdown(figures: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    return percent(figures["iterationTimeMicroseconds"] / reference["iterationTimeMicroseconds"] - 1)


def _changes(clocks_mhz: list[int]) -> int:
    """Count the changes in one iteration of a steady run: the last instruction is followed by the first.

    Constant-time instructions request no clock (0) and change none.
    """
    requested = [clock for clock in clocks_mhz if clock]
    return sum(a != b for a, b in pairwise([*requested, requested[0]])) if requested else 0


def _share(text: str) -> float:
    return float(text.rstrip("%")) / 100

"""Trial: one stage's instructions at two alternating clocks against what the scan predicts for them.

The instructions are runs of work items on one GPU. Each clock is asked for ahead of its instruction by the measured
latency, as an agent with a timetable does; the workload's own progress says when.
"""

from __future__ import annotations

from itertools import accumulate
from statistics import median
from typing import Final

from perseus_agent.errors import AgentError
from perseus_bench.bench import Bench
from perseus_bench.report import ClockPoint, ClockScan, PipelineRun, SwitchTimes
from perseus_bench.workload import Workload
from perseus_core.units import s_from_us

SLOW: Final = 0.75
"""The plan's low clock, as a share of its high one: about where energy is least."""
LATENCIES: Final = 6
"""An instruction lasts so many latencies at least: only then can a clock of its own be worth it."""
SHORTEST_S: Final = 0.1
AROUND_S: Final = 0.3
"""Work before the first and after the last instruction: steps of the energy counter then lie within constant power."""
LOOK_S: Final = 0.000_5
"""Between two looks at the workload's progress."""
PATIENCE: Final = 3.0
"""Times the predicted time after which the run is given up."""


class PipelineFailed(AgentError):
    """The trial cannot be run, or the workload did not finish."""


def run_pipeline(bench: Bench, scan: ClockScan, switches: SwitchTimes, seconds: float) -> PipelineRun:
    """Run alternating instructions.

    Args:
        bench: the GPU under test, with a workload.
        scan: time and power of its clocks.
        switches: its latencies.
        seconds: for the whole run.

    Raises:
        PipelineFailed: there is no workload, or it takes far longer than predicted.
        DeviceError: the driver refused.
        Interrupted: the user ended the run.
    """
    if bench.workload is None:
        raise PipelineFailed("nothing computes: there is no time to compare with the prediction")
    fast, slow = _two_clocks(scan, switches)
    latency = switches.speed or switches.reported
    spans_s = max(SHORTEST_S, LATENCIES * latency.p50_s)
    pairs = max(2, round(seconds / (2 * spans_s)))
    plan = [fast, slow] * pairs
    counts = [max(1, round(spans_s / _time_s(point))) for point in plan]
    before, after = (max(1, round(AROUND_S / _time_s(point))) for point in (plan[0], plan[-1]))
    firsts = list(accumulate(counts, initial=before))
    ahead_s = {
        point.requested_mhz: _latency_s(switches, other.requested_mhz, point.requested_mhz)
        for point, other in ((fast, slow), (slow, fast))
    }
    predicted_s = sum(count * _time_s(point) for count, point in zip(counts, plan, strict=True))
    bench.lock(plan[0].requested_mhz)
    bench.wait(max(0.2, 2 * latency.p99_s))
    energy = bench.energy_meter()
    give_up_s = bench.now_s + PATIENCE * (predicted_s + 2 * AROUND_S) + 1
    with bench.working(firsts[-1] + after) as everything:
        energy.read()
        for number in range(1, len(plan)):
            old, new = plan[number - 1], plan[number]
            start = firsts[number] - ahead_s[new.requested_mhz] / _time_s(old)
            _until_completed(bench, bench.workload, start, give_up_s)
            bench.lock(new.requested_mhz)
            energy.read()
        _until_completed(bench, bench.workload, firsts[-1] + after, give_up_s)
    items = everything[before : firsts[-1]]
    if len(items) < firsts[-1] - before:
        raise PipelineFailed(f"the workload says that it did {len(everything)} of {firsts[-1] + after} items")
    begin_s, end_s = s_from_us(items[0].begin_us), s_from_us(items[-1].begin_us + items[-1].duration_us)
    durations_us = [item.duration_us for item in items]
    middle_s = (_time_s(fast) * _time_s(slow)) ** 0.5
    planned_slow = [point is slow for count, point in zip(counts, plan, strict=True) for _ in range(count)]
    right = sum((s_from_us(us) > middle_s) == is_slow for us, is_slow in zip(durations_us, planned_slow, strict=True))
    powers = [point.power_w for point in plan]
    predicted_j = (
        sum(count * _time_s(point) * (point.power_w or 0) for count, point in zip(counts, plan, strict=True))
        if all(power is not None for power in powers)
        else None
    )
    return PipelineRun(
        clocks_mhz=(fast.requested_mhz, slow.requested_mhz),
        instructions=len(plan),
        items=len(items),
        asked_ahead_s=median(ahead_s.values()),
        predicted_time_s=predicted_s,
        measured_time_s=end_s - begin_s,
        predicted_energy_j=predicted_j,
        measured_energy_j=energy.between_j(begin_s, end_s),
        items_at_plan_share=right / len(items) if _time_s(slow) > 1.03 * _time_s(fast) else None,
    )


def _two_clocks(scan: ClockScan, switches: SwitchTimes) -> tuple[ClockPoint, ClockPoint]:
    """The highest clock and a lower one, both with a measured time and measured changes."""
    measured_mhz = {each.to_mhz for each in switches.transitions}
    usable = [point for point in scan.points if point.requested_mhz in measured_mhz and point.item_time_s]
    if len(usable) < 2:
        raise PipelineFailed("there are fewer than two clocks with a measured time and measured changes")
    fast = usable[0]
    slow = min(usable[1:], key=lambda point: abs(point.requested_mhz - SLOW * fast.requested_mhz))
    return fast, slow


def _time_s(point: ClockPoint) -> float:
    assert point.item_time_s is not None  # _two_clocks takes no others
    return point.item_time_s


def _latency_s(switches: SwitchTimes, from_mhz: int, to_mhz: int) -> float:
    """The median latency of this change, or of all changes where it never succeeded."""
    for each in switches.transitions:
        if (each.from_mhz, each.to_mhz) == (from_mhz, to_mhz):
            return (each.speed or each.reported).p50_s
    return (switches.speed or switches.reported).p50_s


def _until_completed(bench: Bench, workload: Workload, items: float, give_up_s: float) -> None:
    while workload.completed() < items:
        if bench.now_s > give_up_s:
            raise PipelineFailed(f"the work takes more than {PATIENCE:g} times as long as predicted")
        bench.wait(LOOK_S)

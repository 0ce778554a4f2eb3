"""What an acceptance run measured: plain values with the unit in every name, and the JSON that is sent in.

Every figure that was not measured is ``None``, and ``notes`` says why. ``SCHEMA`` changes when the meaning of a field
does. There is no host name here; UUID and node name only where the user asked for them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from perseus_core.hardware import Hardware
from perseus_core.latency import SwitchLatency, by_clock
from perseus_core.marks import MarkSource

SCHEMA: Final = "perseus.energy/acceptance/v1"


@dataclass(frozen=True)
class Durations:
    """Quantiles of a number of durations, seconds."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class CallTimes:
    """How long the driver's calls take."""

    lock: Durations
    reset: Durations
    contended_lock: Durations | None
    """While the other GPUs are locked without pause; None: no other GPU was given."""
    other_gpus: int
    shared_lock: bool | None
    """Whether the GPUs of the node wait for each other; None: not measured."""


@dataclass(frozen=True)
class ClockPoint:
    """The GPU under load at one requested clock."""

    requested_mhz: int
    reached_mhz: int
    """Median of the clock that was read."""
    power_w: float | None
    item_time_s: float | None
    """Median time of a work item; None: there was no workload."""
    power_cap_share: float
    """Of the readings, the share that named the power limit as the reason for a lower clock."""
    reasons: tuple[str, ...]
    """Every reason that was read."""


@dataclass(frozen=True)
class Plateau:
    """Requested clocks that come out as one and the same."""

    highest_mhz: int
    lowest_mhz: int
    reached_mhz: int


@dataclass(frozen=True)
class ClockScan:
    """The scan over clocks under load."""

    default_mhz: int
    """Median of the clock that was read while none was locked."""
    points: tuple[ClockPoint, ...]
    """Highest first."""
    top_usable_mhz: int
    """The highest clock of the scan that the power limit does not hold down."""
    plateaus: tuple[Plateau, ...]
    """Those of more than one clock."""


@dataclass(frozen=True)
class MeasuredTransition:
    """Changes from one clock to another: from the begin of the call to the new clock."""

    from_mhz: int
    to_mhz: int
    reported: Durations
    """Until the SM clock is read as the new one."""
    speed: Durations | None
    """Until work items take the time of the new clock; None: no workload, or the two take the same time."""


@dataclass(frozen=True)
class SwitchTimes:
    """How long changes of the clock take."""

    transitions: tuple[MeasuredTransition, ...]
    reported: Durations
    raises: Durations | None
    lowerings: Durations | None
    speed: Durations | None
    unreached: int
    """Changes after which the new clock was never read; they are in no figure."""
    item_time_s: float | None
    """What ``speed`` was found with: time of a work item at the highest clock of the trial."""


@dataclass(frozen=True)
class Restoration:
    """An agent was killed while its lock was in force, and another one started."""

    locked_mhz: int
    survived_kill: bool
    """The lock outlived the process: the driver keeps it, so somebody must give it back."""
    restored_s: float | None
    """From the start of the new agent's process to default clocks; None: not within the time allowed."""
    journal_empty: bool
    """Whether the journal lists no GPU any more."""


@dataclass(frozen=True)
class PipelineRun:
    """One stage's instructions at alternating clocks, asked for ahead by the measured latency."""

    clocks_mhz: tuple[int, int]
    """Highest and lowest of the plan."""
    instructions: int
    items: int
    asked_ahead_s: float
    """Median latency by which a clock was asked for before its instruction."""
    predicted_time_s: float
    measured_time_s: float
    predicted_energy_j: float | None
    measured_energy_j: float | None
    items_at_plan_share: float | None
    """Of the work items, the share that took the time of their own clock rather than of the other one."""

    @property
    def time_deviation_percent(self) -> float:
        """Measured over predicted time, minus one."""
        return 100 * (self.measured_time_s / self.predicted_time_s - 1)

    @property
    def energy_deviation_percent(self) -> float | None:
        """The same of energy."""
        if self.predicted_energy_j is None or self.measured_energy_j is None:
            return None
        return 100 * (self.measured_energy_j / self.predicted_energy_j - 1)


@dataclass(frozen=True)
class AcceptanceReport:
    """Everything that one run found out. A trial that was not run, or failed, is ``None``; ``notes`` says why."""

    date: str
    gpu_model: str
    driver_version: str
    supported_clocks_mhz: tuple[int, ...]
    perseus_version: str
    python_version: str
    workload: str
    """What computed; empty: nothing, the reported clock is all that is known."""
    minutes: float
    simulated: bool
    calls: CallTimes | None = None
    scan: ClockScan | None = None
    switches: SwitchTimes | None = None
    restoration: Restoration | None = None
    pipeline: PipelineRun | None = None
    clocks_returned: bool = False
    complete: bool = False
    notes: tuple[str, ...] = ()
    gpu_uuid: str = ""
    node_name: str = ""

    def latency(self) -> SwitchLatency | None:
        """The measured latency in the form that agents and planners use.

        Returns:
            The speed's latency where it was measured, else the reported clock's; None: no change was measured.
        """
        if self.switches is None or self.calls is None:
            return None
        seen = self.switches.speed or self.switches.reported
        shared = self.calls.shared_lock is not False  # not measured: the published worst case
        return SwitchLatency.of_seconds(
            seen.p50_s, max(seen.p99_s, seen.p50_s), self.calls.lock.p50_s, shared, "measured on this GPU"
        )

    def latency_by_clock(self) -> dict[int, SwitchLatency]:
        """The same by the clock that is changed to, MHz, of those that were changed to often enough."""
        latency = self.latency()
        if self.switches is None or latency is None:
            return {}
        seen: dict[int, list[Durations]] = {}
        for one in self.switches.transitions:
            if (durations := one.speed if self.switches.speed else one.reported) is not None:
                seen.setdefault(one.to_mhz, []).append(durations)
        return by_clock(
            latency,
            {mhz: (sum(d.count for d in trials), median(d.p50_s for d in trials)) for mhz, trials in seen.items()},
        )

    def hardware(self) -> Hardware | None:
        """What ``perseus plan --hardware`` reads; None: no latency was measured.

        Who marks instructions is a property of the training program, not of the GPU: marks are what the project's
        client makes on CUDA. Launches and kernels are left to the planner's defaults. GPUs that were seen to wait for
        each other are taken for one stage's, which is the worst case.

        Raises:
            ValueError: what was measured is beyond what plans can be rehearsed with; the message names the field.
        """
        latency = self.latency()
        if latency is None or self.calls is None:
            return None
        return Hardware(
            model=self.gpu_model,
            latency=latency,
            marks=MarkSource.GPU,
            gpus_per_lock=1 + self.calls.other_gpus if self.calls.shared_lock else 1,
            clocks=dict(sorted(self.latency_by_clock().items())),
        )


def report_json(report: AcceptanceReport) -> dict[str, Any]:
    """The report as JSON values."""
    body = asdict(report)
    if report.pipeline is not None:
        body["pipeline"]["time_deviation_percent"] = report.pipeline.time_deviation_percent
        body["pipeline"]["energy_deviation_percent"] = report.pipeline.energy_deviation_percent
    latency = report.latency()
    body["switch_latency"] = latency and {
        "p50_s": latency.p50_s,
        "p99_s": latency.p99_s,
        "call_s": latency.call_s,
        "shared_lock": latency.shared_lock,
        "source": latency.source,
    }
    for private in ("gpu_uuid", "node_name"):
        if not body[private]:
            del body[private]
    return {"schema": SCHEMA, **body}

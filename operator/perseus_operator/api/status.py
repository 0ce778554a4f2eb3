"""The status of a PerseusJob, typed: everything but conditions.

The CRD's schema is generated from these classes. The spec, which users write, is in ``job``.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_core.latency import MAX_LATENCY_US
from perseus_operator.api.advice import AdviceStatus, SweepStatus
from perseus_operator.api.objective import PERCENT, PERCENT_RULE, WEEK_US, share, signed
from perseus_operator.api.pipeline import MAX_PLACES
from perseus_operator.api.power_status import PowerSmoothingStatus, ShareStatus
from perseus_operator.api.schema import integer, listing, names, nested, text

MAX_MISFIT: Final = 512
"""Characters of what does not fit."""


@dataclass(frozen=True, kw_only=True)
class ShapeStatus:
    """The shape of a job as its training processes report it, where its spec leaves it out or they do not fit it."""

    schedule: str = text(
        "Steps (whole iterations) or FromRanks (the pipeline schedule that they report).",
        rule="Steps or FromRanks",
        max_length=16,
        pattern="^(Steps|FromRanks)$",
    )
    stages: int = integer("Pipeline stages.", minimum=1, maximum=1024)
    data_parallel: int = integer("Number of pipelines.", minimum=1, maximum=65536)
    tensor_parallel: int = integer(
        "GPUs that share each stage; of whole iterations of processes that fit no pipeline, all of them.",
        minimum=1,
        maximum=MAX_PLACES,
    )
    misfit: str | None = text(
        "Why iterations are planned as a whole, with one clock for all GPUs, though the job has a pipeline.",
        rule="a sentence",
        max_length=MAX_MISFIT,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class FrontierStatus:
    """The solved frontier in figures; the plans themselves are in the PerseusFrontier of the job's name."""

    digest: str = text("SHA-256 of everything the frontier was solved from.", rule="a digest", max_length=64)
    points: int = integer("Number of plans.", minimum=1, maximum=100_000)
    minimum_time_microseconds: int = integer("T_min: the fastest iteration.", minimum=1, maximum=WEEK_US)
    minimum_energy_time_microseconds: int = integer("The iteration of least energy.", minimum=1, maximum=WEEK_US)
    slowest_time_microseconds: int = integer(
        "T*: slower plans save no energy, even while the pipeline waits for a straggler.", minimum=1, maximum=WEEK_US
    )
    mean_gap: str = share(
        "Certified optimality gap of the plan that runs, on average over all deadlines from T_min to least energy.",
        ppm="mean_gap_parts_per_million",
    )
    maximum_gap: str = share(
        "Largest certified optimality gap of the plan that runs, over the same deadlines.",
        ppm="maximum_gap_parts_per_million",
    )
    solve_milliseconds: int = integer("Time the solver took.", minimum=0, maximum=10**9)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Time and energy of one iteration of the whole job."""

    iteration_time_microseconds: int = integer("Time of one iteration.", minimum=0, maximum=WEEK_US)
    energy_millijoules: int | None = integer(
        "Energy of all GPUs of the job in one iteration; absent if some GPU has no counter.",
        minimum=0,
        maximum=2**53,
        required=False,
    )
    iterations: int | None = integer(
        "Iterations these figures were measured over; absent for a prediction.",
        minimum=1,
        maximum=2**31 - 1,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class PlanStatus:
    """The plan that pipelines without a straggler run."""

    point: int = integer("Index on the frontier, 0 is the fastest.", minimum=0, maximum=100_000)
    from_iteration: int = integer("First iteration that ran it.", minimum=0, maximum=2**53)
    planned_slowdown: str = text(
        "Slowdown that the plan intends, against T_min.", rule=PERCENT_RULE, max_length=9, pattern=PERCENT
    )
    clock_changes: int | None = integer(
        "Clock changes in one iteration, over all stages of one pipeline.",
        minimum=0,
        maximum=2**31 - 1,
        required=False,
    )
    grain: str | None = text(
        "How finely it sets clocks: Instruction, Segment (lead, steady state and tail of a stage), Stage or None;"
        " absent: the plan was not rehearsed, as the GPUs are not known yet.",
        rule="Instruction, Segment, Stage or None",
        max_length=16,
        pattern="^(Instruction|Segment|Stage|None)$",
        required=False,
    )
    reason: str | None = text("Why this grain, in a sentence.", rule="a sentence", max_length=512, required=False)
    expected_savings: str | None = signed(
        "Expected energy against every GPU at its highest clock; negative: more energy. A prediction: what is saved is"
        " in savings.",
        required=False,
    )
    expected_iteration_time_microseconds: int | None = integer(
        "Median iteration time that the rehearsal expects.", minimum=1, maximum=WEEK_US, required=False
    )
    kept_iteration_time_microseconds: int | None = integer(
        "Iteration time that the rehearsal expects to be kept by 95 % of iterations. The objective is held to it.",
        minimum=1,
        maximum=WEEK_US,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class ClockLatencyStatus:
    """How long changes to one clock take, from the request to the clock in effect."""

    megahertz: int = integer("The clock that is changed to.", minimum=1, maximum=10_000)
    median_microseconds: int = integer("Median time of a change to it.", minimum=1, maximum=MAX_LATENCY_US)
    p99_microseconds: int = integer("99th percentile of the same time.", minimum=1, maximum=MAX_LATENCY_US)


@dataclass(frozen=True, kw_only=True)
class HardwareStatus:
    """What plans are rehearsed under. A later operator goes on with it."""

    gpu: str = text("GPU model; of several the one with the slowest clock changes.", rule="a name", max_length=256)
    switch_latency_median_microseconds: int = integer(
        "Median time of a clock change, from the request to the new clock in effect; of changes to clocks that are not"
        " in clocks.",
        minimum=0,
        maximum=MAX_LATENCY_US,
    )
    switch_latency_p99_microseconds: int = integer(
        "99th percentile of the same time.", minimum=0, maximum=MAX_LATENCY_US
    )
    call_microseconds: int = integer(
        "Median time that a call to the driver takes of it.", minimum=0, maximum=MAX_LATENCY_US
    )
    gpus_per_lock: int = integer(
        "GPUs of one stage on a node whose calls to the driver wait for each other.", minimum=1, maximum=1024
    )
    figures: str = text(
        "Where these times come from: Measured (on GPUs of the job), Stored (by an earlier job on the same model, with"
        " the profile) or Assumed (published for the model, or the worst of what is).",
        rule="Measured, Stored or Assumed",
        max_length=8,
        pattern="^(Measured|Stored|Assumed)$",
    )
    source: str = text("The same in a clause.", rule="a clause", max_length=512)
    marks: str = text(
        "Whose time the marks of instructions are in: Gpu, Synchronised (a host that waits for its GPU), Events (of the"
        " GPU, known an iteration later), Host (which launches ahead of the GPU), or Unknown.",
        rule="Gpu, Synchronised, Events, Host or Unknown",
        max_length=16,
        pattern="^(Gpu|Synchronised|Events|Host|Unknown)$",
    )
    noise: str = share("Relative standard deviation of an instruction's duration.", ppm="noise_parts_per_million")
    median_lead_microseconds: int | None = integer(
        "Median time between a host's mark and the begin of the instruction on the GPU, of the rank with the largest;"
        " absent: not reported.",
        minimum=-(2**31),
        maximum=2**31 - 1,
        required=False,
    )
    clocks: tuple[ClockLatencyStatus, ...] | None = listing(
        "The same times of changes to clocks that were measured often enough; absent: of none.",
        ClockLatencyStatus,
        key="megahertz",
        max_items=255,
    )


@dataclass(frozen=True, kw_only=True)
class StragglerStatus:
    """A pipeline that is slow, and what it runs."""

    data_parallel_rank: int = integer("Data-parallel rank of the pipeline.", minimum=0, maximum=65535)
    slowdown: str = text("How much slower than planned.", rule=PERCENT_RULE, max_length=9, pattern=PERCENT)
    stage: int | None = integer(
        "Its slowest stage, if telemetry singles one out.", minimum=0, maximum=1023, required=False
    )
    source: str = text(
        "Detected (from telemetry) or Declared (by annotation).", rule="Detected or Declared", max_length=16
    )
    cause: str | None = text(
        "Thermal, Power, Clock, Communication or Unknown: from its GPUs' events or telemetry.",
        rule="one of these words",
        max_length=16,
        required=False,
    )
    point: int = integer("Index on the frontier that this pipeline runs.", minimum=0, maximum=100_000)


@dataclass(frozen=True, kw_only=True)
class Savings:
    """What the plan saves."""

    energy: str = signed("Energy saved per iteration; negative: more energy.")
    slowdown: str = signed("By how much an iteration takes longer; negative: less long.")
    against: str | None = text(
        "Comparisons: iterations without the plan between those with it, the mean of the latest. Baseline: the"
        " iterations before the first plan, until the first comparison.",
        rule="Comparisons or Baseline",
        max_length=16,
        required=False,
    )
    energy_low: str | None = signed("With 95 % confidence at least this; absent: fewer than two comparisons.", False)
    energy_high: str | None = signed("And at most this.", False)
    slowdown_low: str | None = signed("With 95 % confidence at least this.", False)
    slowdown_high: str | None = signed("And at most this.", False)


@dataclass(frozen=True, kw_only=True)
class PairStatus:
    """One comparison."""

    number: int = integer("0 is the oldest that is kept.", minimum=0, maximum=1000)
    saved: str = signed("Of the energy without the plan.", ppm="saved_parts_per_million")
    slowdown: str = signed("Of the time without the plan.", ppm="slowdown_parts_per_million")


@dataclass(frozen=True, kw_only=True)
class ComparisonStatus:
    """Comparisons of the plan with default clocks, made while the job runs."""

    last_iteration: int = integer("Iteration at which the latest one ended.", minimum=0, maximum=2**53)
    without: Figures = nested("Median time and energy at default clocks in the latest one.", Figures)
    pairs: tuple[PairStatus, ...] | None = listing("The latest 20.", PairStatus, key="number", max_items=20)


@dataclass(frozen=True, kw_only=True)
class CanaryStatus:
    """Of mode Canary: what came of the plan on one pipeline."""

    phase: str = text("Testing, Passed or Failed.", rule="Testing, Passed or Failed", max_length=16)
    saved: str | None = signed(
        "Of the energy at default clocks; absent: not known yet.", False, ppm="saved_parts_per_million"
    )
    slowdown: str | None = signed(
        "Of the time at default clocks; absent: not known yet.", False, ppm="slowdown_parts_per_million"
    )
    slow_attempts: int | None = integer(
        "Attempts in which iterations were slower than planned; three in all, and it has failed.",
        minimum=0,
        maximum=100,
        required=False,
    )
    message: str | None = text(
        "Why it failed, or was too slow in the latest attempt.", rule="a sentence", max_length=400, required=False
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationStatus:
    """How well predicted iteration times come true, judged on iterations that nothing was fitted to."""

    quality: str = text("Explains or DoesNotExplain.", rule="Explains or DoesNotExplain", max_length=16)
    held_out_error: str | None = text(
        "Mean error of predicted iteration times, on iterations not used for fitting.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        required=False,
    )
    uncalibrated_error: str = text(
        "Mean error of predicted iteration times without calibration.", rule=PERCENT_RULE, max_length=9, pattern=PERCENT
    )
    allowance: str = text(
        "Plans are made for a bound shorter by this share, so that nearly all iterations keep the bound.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
    )
    iterations: int = integer(
        "Iterations that the calibration was fitted to or tested on.", minimum=0, maximum=2**31 - 1
    )


@dataclass(frozen=True, kw_only=True)
class GuardStatus:
    """That the bound was exceeded, for an operator that comes after."""

    hold: str = text(
        "Nothing, Segments or Stages (plans with one clock for each segment of a stage, or for each stage), FastestPlan"
        " or DefaultClocks.",
        rule="one of these words",
        max_length=16,
    )
    about: str = text("Digest of the frontier and objective that it is about.", rule="a digest", max_length=64)
    trips: int = integer("How often in a row the plan was withdrawn.", minimum=0, maximum=1_000_000)
    until: str = text(
        "When the plan is tried again, or has held long enough.",
        rule="a date and time",
        max_length=40,
        string_format="date-time",
    )
    since_iteration: int = integer("Iterations before this one are not counted.", minimum=0, maximum=2**53)
    measured_time_microseconds: int = integer(
        "Measured iteration time when the plan was withdrawn.", minimum=0, maximum=WEEK_US
    )
    allowed_time_microseconds: int = integer("Bound on the iteration time at that moment.", minimum=0, maximum=WEEK_US)
    reference_time_microseconds: int | None = integer(
        "Iteration time at default clocks, measured afterwards.", minimum=0, maximum=WEEK_US, required=False
    )
    cause: str | None = text(
        "PowerLimit, EarlyMarks, SlowClockChanges, GpuTimesUnknown or Unknown: why iterations were too slow.",
        rule="one of these words",
        max_length=24,
        pattern="^(PowerLimit|EarlyMarks|SlowClockChanges|GpuTimesUnknown|Unknown)$",
        required=False,
    )
    evidence: str | None = text(
        "What agents reported that shows the cause.", rule="a clause", max_length=256, required=False
    )


@dataclass(frozen=True, kw_only=True)
class ClockStatus:
    """Of a job with objective FixedClock: the clock, and where it is in force."""

    megahertz: int = integer("The clock that the GPUs shall run at.", minimum=1, maximum=100_000)
    gpus: int = integer("GPUs of the job that its agents have found.", minimum=0, maximum=10**6)
    locked: int = integer("Those of them that are locked at the clock.", minimum=0, maximum=10**6)


@dataclass(frozen=True, kw_only=True)
class StatusFigures:
    """Everything in status but conditions and observedGeneration."""

    shape: ShapeStatus | None = nested(
        "Shape of the job, where spec.pipeline leaves it to the training processes, or they do not fit it.",
        ShapeStatus,
        required=False,
    )
    frontier: FrontierStatus | None = nested("The solved frontier.", FrontierStatus, required=False)
    plan: PlanStatus | None = nested("The plan in force.", PlanStatus, required=False)
    clock: ClockStatus | None = nested("Of objective FixedClock.", ClockStatus, required=False)
    predicted: Figures | None = nested("Predicted time and energy of the plan in force.", Figures, required=False)
    measured: Figures | None = nested("Median time and energy of the latest iterations.", Figures, required=False)
    calibration: CalibrationStatus | None = nested(
        "How well predicted iteration times come true.", CalibrationStatus, required=False
    )
    baseline: Figures | None = nested(
        "Median time and energy at default clocks, before the first plan.", Figures, required=False
    )
    hardware: HardwareStatus | None = nested(
        "What is known of the job's GPUs that matters to plans; absent: no agent has described them all yet.",
        HardwareStatus,
        required=False,
    )
    power_profiles: tuple[str, ...] | None = names(
        "Workload power profiles that the driver enforces on GPUs of the job, under which baseline and savings are"
        " measured; absent: none.",
        rule="a name of a power profile",
        pattern=r"^[A-Z][A-Z0-9_]*$",
        max_items=256,
    )
    power_smoothing: PowerSmoothingStatus | None = nested(
        "Power smoothing of GPUs of the job; absent: none is smoothed.", PowerSmoothingStatus, required=False
    )
    advised: AdviceStatus | None = nested("The plan that the objective asks for.", AdviceStatus, required=False)
    sweep: SweepStatus | None = nested(
        "What measuring the profile will cost, or would in a mode that sets clocks; absent: there is one, or none is to"
        " be measured, or it is being measured.",
        SweepStatus,
        required=False,
    )
    power_budget: ShareStatus | None = nested("The job's share of a PowerBudget.", ShareStatus, required=False)
    guard: GuardStatus | None = nested(
        "State of the bound guard; absent: the bound was not exceeded lately.", GuardStatus, required=False
    )
    canary: CanaryStatus | None = nested("Of mode Canary.", CanaryStatus, required=False)
    comparison: ComparisonStatus | None = nested(
        "Comparisons of the plan with default clocks; absent: none was complete yet.", ComparisonStatus, required=False
    )
    savings: Savings | None = nested("Measured savings; never predicted ones.", Savings, required=False)
    stragglers: tuple[StragglerStatus, ...] | None = listing(
        "Pipelines that are stragglers now; at most the 32 slowest.",
        StragglerStatus,
        key="dataParallelRank",
        max_items=32,
    )

"""The spec of a PerseusJob, typed: which fields exist, what they mean, their bounds and defaults.

The CRD's schema is generated from these classes and manifests are parsed into them (``schema``). Values are frozen;
units are in the names. No defaults are defined elsewhere, and the operator honours every field.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from perseus_operator.api.pipeline import Pipeline
from perseus_operator.api.schema import DNS_NAME, Rule, camel, choice, flag, integer, nested, parse, text
from perseus_operator.api.workload import Workload
from perseus_operator.errors import InvalidSpec
from perseus_proto import keys
from perseus_proto.units import ratio_from_percent

PERCENT = r"^[0-9]{1,3}(\.[0-9]{1,4})?%$"
PERCENT_RULE = "a percentage such as 3% or 2.5%"
MAX_BLOCKING_POWER_MW = 2_000_000
WEEK_US = 7 * 24 * 3600 * 1_000_000


class ObjectiveType(StrEnum):
    """What to choose from the time-energy frontier."""

    MAX_THROUGHPUT = "MaxThroughput"
    MIN_ENERGY = "MinEnergy"
    MAX_SLOWDOWN = "MaxSlowdown"
    DEADLINE = "Deadline"
    POWER_CAP = "PowerCap"


class StragglerMode(StrEnum):
    """How stragglers become known."""

    AUTOMATIC = "Automatic"
    EXTERNAL = "External"
    IGNORE = "Ignore"


class Mode(StrEnum):
    """Whether clocks are set."""

    ENFORCE = "Enforce"
    RECOMMEND = "Recommend"


@dataclass(frozen=True, kw_only=True)
class ConfigMapRef:
    """The ConfigMap that stores the profile, in the namespace of the PerseusJob."""

    name: str = text("Name of the ConfigMap.", rule="the name of a ConfigMap", max_length=253, pattern=DNS_NAME)
    key: str = text(
        "Key that holds the CSV.",
        rule="a ConfigMap key",
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        default=keys.PROFILE_KEY,
    )


@dataclass(frozen=True, kw_only=True)
class ProfileRef:
    """The PerseusProfile that stores the profile, in the namespace of the PerseusJob."""

    name: str = text(
        "Name of the PerseusProfile.", rule="the name of a PerseusProfile", max_length=253, pattern=DNS_NAME
    )


@dataclass(frozen=True, kw_only=True)
class Online:
    """How the profile is measured on the running job."""

    max_clocks: int = integer(
        "At most this many clocks are measured, at equal steps from the highest that all GPUs of the job support.",
        minimum=2,
        maximum=255,
        default=24,
    )
    iterations_per_clock: int = integer(
        "Iterations measured at each clock, after the first, which does not count.",
        minimum=1,
        maximum=1000,
        default=5,
    )
    max_slowdown: str = text(
        "No clock is measured at which iterations could take longer than at the highest clock by more than this.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        default="100%",
    )
    max_duration_seconds: int = integer(
        "Training time that measuring may take; what has been measured by then is the profile.",
        minimum=1,
        maximum=7 * 24 * 3600,
        default=3600,
    )

    @property
    def max_slowdown_ratio(self) -> float:
        """``"100%"`` as 1.0."""
        return ratio_from_percent(self.max_slowdown)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Time and energy of every instruction at every clock."""

    config_map_ref: ConfigMapRef | None = nested(
        "ConfigMap with the profile CSV: stage,instruction,frequency,time,energy (MHz, seconds, joules).",
        ConfigMapRef,
        required=False,
    )
    profile_ref: ProfileRef | None = nested(
        "PerseusProfile with the profile: one that was measured on another job, or that you wrote.",
        ProfileRef,
        required=False,
    )
    online: Online | None = nested(
        "Measure the profile on the running job if the PerseusProfile does not exist, and store it for later jobs.",
        Online,
        required=False,
    )
    blocking_power_milliwatts: int | None = integer(
        "Power of one GPU while it waits for another stage, in milliwatts; absent: as the PerseusProfile says.",
        minimum=0,
        maximum=MAX_BLOCKING_POWER_MW,
        required=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.configMapRef) != has(self.profileRef)",
            "exactly one of configMapRef and profileRef must be set",
            lambda p: (p.config_map_ref is None) != (p.profile_ref is None),
        ),
        Rule(
            "!has(self.online) || has(self.profileRef)",
            "online needs profileRef: what is measured is stored in a PerseusProfile",
            lambda p: p.online is None or p.profile_ref is not None,
        ),
        Rule(
            "has(self.profileRef) || has(self.blockingPowerMilliwatts)",
            "blockingPowerMilliwatts must be set with configMapRef",
            lambda p: p.profile_ref is not None or p.blocking_power_milliwatts is not None,
        ),
    )

    @property
    def where(self) -> str:
        """The object that stores it, for people."""
        if self.config_map_ref is not None:
            return f"ConfigMap {self.config_map_ref.name}"
        return f"PerseusProfile {self.profile_ref.name}" if self.profile_ref is not None else "no object"


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """Either a time for each iteration, or a date by which a number of iterations must be done."""

    iteration_time_microseconds: int | None = integer(
        "Every iteration may take this long.", minimum=1, maximum=WEEK_US, required=False
    )
    finish_by: str | None = text(
        "Date and time, RFC 3339, by which `iterations` iterations must be done.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$",
        string_format="date-time",
        required=False,
    )
    iterations: int | None = integer(
        "Iterations of the whole run, counted from its start.", minimum=1, maximum=1_000_000_000, required=False
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.iterationTimeMicroseconds) != has(self.finishBy)",
            "exactly one of iterationTimeMicroseconds and finishBy must be set",
            lambda d: (d.iteration_time_microseconds is not None) != (d.finish_by is not None),
        ),
        Rule(
            "has(self.finishBy) == has(self.iterations)",
            "finishBy and iterations must be set together",
            lambda d: (d.finish_by is not None) == (d.iterations is not None),
        ),
    )


def _only_for(kind: ObjectiveType, name: str) -> Rule:
    """A parameter is set if and only if the objective has its type."""
    return Rule(
        f"(self.type == '{kind}') == has(self.{camel(name)})",
        f"{camel(name)} must be set if and only if type is {kind}",
        lambda objective: (objective.type == kind) == (getattr(objective, name) is not None),
    )


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which point of the frontier the job runs at."""

    type: ObjectiveType = choice(
        "MaxThroughput: no slowdown. MinEnergy: least energy per iteration. MaxSlowdown, Deadline: least energy"
        " within that bound. PowerCap: fastest within that bound.",
        ObjectiveType,
        default=ObjectiveType.MAX_THROUGHPUT.value,
    )
    max_slowdown: str | None = text(
        "Allowed slowdown against the fastest iteration, for type MaxSlowdown. Iterations scatter: compared are the"
        " times that 95 % of them keep.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        required=False,
    )
    deadline: Deadline | None = nested("Time bound, for type Deadline.", Deadline, required=False)
    power_cap_watts: int | None = integer(
        "Allowed average power of all GPUs of the job together, for type PowerCap.",
        minimum=1,
        maximum=1_000_000_000,
        required=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        _only_for(ObjectiveType.MAX_SLOWDOWN, "max_slowdown"),
        _only_for(ObjectiveType.DEADLINE, "deadline"),
        _only_for(ObjectiveType.POWER_CAP, "power_cap_watts"),
    )

    @property
    def max_slowdown_ratio(self) -> float | None:
        """``"3%"`` as 0.03."""
        return None if self.max_slowdown is None else ratio_from_percent(self.max_slowdown)


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """What to do about a pipeline that is slower than the others. Changeable while the job runs."""

    mode: StragglerMode = choice(
        "Automatic: detected from telemetry or declared by annotation. External: declared only. Ignore: neither.",
        StragglerMode,
        default=StragglerMode.AUTOMATIC.value,
    )
    slowdown_threshold: str = text(
        "A pipeline slower than the others by this much is a straggler.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        default="5%",
    )
    recovery_threshold: str = text(
        "A straggler has recovered once it is slower by less than this; must be below slowdownThreshold.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        default="2%",
    )
    confirm_iterations: int = integer(
        "Consecutive iterations that must agree before a straggler is detected or has recovered.",
        minimum=1,
        maximum=1000,
        default=2,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "double(self.recoveryThreshold.replace('%', '')) < double(self.slowdownThreshold.replace('%', ''))",
            "recoveryThreshold must be below slowdownThreshold",
            lambda s: s.recovery_ratio < s.slowdown_ratio,
        ),
    )

    @property
    def slowdown_ratio(self) -> float:
        """``"5%"`` as 0.05."""
        return ratio_from_percent(self.slowdown_threshold)

    @property
    def recovery_ratio(self) -> float:
        """``"2%"`` as 0.02."""
        return ratio_from_percent(self.recovery_threshold)


@dataclass(frozen=True, kw_only=True)
class Switching:
    """Plans with few clock changes."""

    max_energy_loss: str = text(
        "Energy of an iteration that may be given up for fewer clock changes.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        default="0.2%",
    )

    @property
    def max_energy_loss_ratio(self) -> float:
        """``"0.2%"`` as 0.002."""
        return ratio_from_percent(self.max_energy_loss)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user wants."""

    pipeline: Pipeline = nested("Shape of the training job.", Pipeline)
    profile: Profile = nested("Measurements to plan from.", Profile)
    workload: Workload | None = nested(
        "Which pods belong to the job; absent: all that carry the label perseus.energy/job with its name.",
        Workload,
        required=False,
    )
    objective: Objective = nested("What to choose from the time-energy frontier.", Objective, default={})
    straggler: Straggler = nested("What to do about slow pipelines.", Straggler, default={})
    suspend: bool = flag(
        "Do not manage the job: its GPUs run at default clocks and nothing is measured. Profile and frontier are kept."
    )
    ttl_seconds_after_finished: int | None = integer(
        "Delete the PerseusJob so long after all its pods have succeeded, as a Job does; absent: keep it.",
        minimum=0,
        maximum=10 * 365 * 24 * 3600,
        required=False,
    )
    mode: Mode = choice(
        "Enforce: set clocks. Recommend: plan and report only, set no clocks.", Mode, default=Mode.ENFORCE.value
    )
    priority: int = integer(
        "Among the jobs of a PowerBudget, as far as it grants priority to the namespace: while power is short, jobs of"
        " lower priority are slowed first.",
        minimum=-1_000_000,
        maximum=1_000_000,
        default=0,
    )
    switching: Switching | None = nested(
        "Prefer plans with few clock changes; absent: as many changes as pay on the job's GPUs.",
        Switching,
        required=False,
    )
    points: int = integer("Points of the frontier to compute.", minimum=2, maximum=1000, default=100)
    baseline_iterations: int = integer(
        "Iterations measured at default clocks before the plan is applied; savings are reported against them. 0: do not"
        " measure.",
        minimum=0,
        maximum=1000,
        default=3,
    )


def parse_spec(raw: Any) -> JobSpec:
    """Parse the spec of a PerseusJob.

    Args:
        raw: ``spec`` as the API server sends it; None: absent.

    Returns:
        The spec with all defaults.

    Raises:
        InvalidSpec: one line, ``spec.field: rule``.

    >>> profile = {"configMapRef": {"name": "gpt3"}, "blockingPowerMilliwatts": 80000}
    >>> spec = parse_spec({"pipeline": {"schedule": "1F1B", "stages": 4, "microbatches": 8}, "profile": profile})
    >>> spec.objective.type, spec.pipeline.data_parallel
    (<ObjectiveType.MAX_THROUGHPUT: 'MaxThroughput'>, 1)
    >>> parse_spec({"pipeline": {"schedule": "1F1B", "stages": 4}, "profile": profile})
    Traceback (most recent call last):
    perseus_operator.errors.InvalidSpec: spec.pipeline: microbatches must be set for a schedule by name
    """
    if raw is None:
        raise InvalidSpec("spec: is required")
    return parse(JobSpec, raw, "spec")

"""The spec of a PerseusJob, typed: which fields exist, what they mean, their bounds and defaults.

The CRD's schema is generated from these classes and manifests are parsed into them (``schema``). Values are frozen;
units are in the names. No defaults are defined elsewhere, and the operator honours every field.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, Protocol

from perseus_core import keys
from perseus_core.units import ratio_from_percent
from perseus_operator.api.comparison import Comparison
from perseus_operator.api.objective import PERCENT, PERCENT_RULE, Objective, ObjectiveType
from perseus_operator.api.pipeline import NO_PIPELINE, Pipeline
from perseus_operator.api.schema import DNS_NAME, Rule, choice, flag, integer, nested, parse, text
from perseus_operator.api.workload import Workload

MAX_BLOCKING_POWER_MW = 2_000_000


class StragglerMode(StrEnum):
    """How stragglers become known."""

    AUTOMATIC = "Automatic"
    EXTERNAL = "External"
    IGNORE = "Ignore"


class Mode(StrEnum):
    """Whether clocks are set."""

    ENFORCE = "Enforce"
    CANARY = "Canary"
    RECOMMEND = "Recommend"
    OBSERVE = "Observe"

    @property
    def sets_clocks(self) -> bool:
        """Whether clocks may be set at all."""
        return self in (Mode.ENFORCE, Mode.CANARY)


class WorkSpec(Protocol):
    """What every spec says whose GPUs' clocks are set, a PerseusJob's or a ServingPool's."""

    @property
    def mode(self) -> Mode:
        """Whether clocks are set."""
        ...

    @property
    def priority(self) -> int:
        """Among the members of a PowerBudget."""
        ...

    @property
    def suspend(self) -> bool:
        """Whether it is not to be managed."""
        ...

    @property
    def ttl_seconds_after_finished(self) -> int | None:
        """How long after its end it is deleted; None: it is kept."""
        ...

    @property
    def pods(self) -> Workload | None:
        """Which pods belong to it, of those that opted in; None: all."""
        ...


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

    @classmethod
    def default(cls) -> Online:
        """With the defaults of all fields."""
        return parse(cls, {}, "online")

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
        "Measure the profile on the running job if the PerseusProfile does not exist, and store it for later jobs;"
        " without profileRef for this job alone, in a PerseusProfile of its name that goes with it.",
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
            "has(self.configMapRef) != has(self.profileRef)"
            " || (has(self.online) && !has(self.configMapRef) && !has(self.profileRef))",
            "exactly one of configMapRef and profileRef must be set, or online alone",
            lambda p: (p.config_map_ref is None) != (p.profile_ref is None) or (p.is_own and p.online is not None),
        ),
        Rule(
            "!has(self.online) || !has(self.configMapRef)",
            "online must not be set with configMapRef: what is measured is stored in a PerseusProfile",
            lambda p: p.online is None or p.config_map_ref is None,
        ),
        Rule(
            "!has(self.configMapRef) || has(self.blockingPowerMilliwatts)",
            "blockingPowerMilliwatts must be set with configMapRef",
            lambda p: p.config_map_ref is None or p.blocking_power_milliwatts is not None,
        ),
    )

    @property
    def is_own(self) -> bool:
        """Whether it is measured for one job alone, and goes with it."""
        return self.config_map_ref is None and self.profile_ref is None

    @property
    def where(self) -> str:
        """The object that stores it, for people."""
        if self.config_map_ref is not None:
            return f"ConfigMap {self.config_map_ref.name}"
        return f"PerseusProfile {self.profile_ref.name}" if self.profile_ref is not None else "no object"


NO_PROFILE: Final = Profile()
"""Stands for a profile that the spec leaves out."""


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


def _planned(name: str) -> Rule:
    """What plans are made from may be set only if there is to be a plan."""
    return Rule(
        f"!has(self.{name}) || self.objective.type != '{ObjectiveType.FIXED_CLOCK}'",
        f"{name} must not be set with objective.type {ObjectiveType.FIXED_CLOCK}",
        lambda spec: getattr(spec, name) is getattr(JobSpec, name) or spec.is_planned,
    )


_KIND_STAYS: Final = Rule(
    " == ".join(f"({variable}.objective.type == '{ObjectiveType.FIXED_CLOCK}')" for variable in ("self", "oldSelf")),
    "whether a job is planned or runs at a fixed clock is immutable: create another PerseusJob",
    lambda _: True,  # only the API server sees what was there before
)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user wants."""

    pipeline: Pipeline = nested(
        "Shape of the training job; absent: as its training processes report it. Not for objective FixedClock.",
        Pipeline,
        required=False,
        kept="pipeline can be neither set nor removed later: create another PerseusJob",
        absent=NO_PIPELINE,
    )
    profile: Profile = nested(
        "Measurements to plan from; absent: they are made on the running job, and stored in the PerseusProfile of its"
        " name. Not for objective FixedClock.",
        Profile,
        required=False,
        absent=NO_PROFILE,
    )
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
        "Enforce: set clocks. Canary: set those of one pipeline first, then of all if it saves and is no slower than"
        " planned, else of none. Recommend: plan and report only, set no clocks. Observe: set no clocks, and predict"
        " what plans would save, without a profile of the job from a model.",
        Mode,
        default=Mode.ENFORCE.value,
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
    comparison: Comparison = nested(
        "Interrupt the plan for some iterations now and then, and compare: what it saves is then measured while"
        " training changes, with an interval of confidence. Not while a PowerBudget or a straggler decides.",
        Comparison,
        default={},
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        _planned("pipeline"),
        _planned("profile"),
        _KIND_STAYS,
        Rule(
            f"self.mode != '{Mode.CANARY}' || self.baselineIterations > 0",
            "baselineIterations must be above 0 with mode Canary, which compares with them",
            lambda spec: spec.mode is not Mode.CANARY or spec.baseline_iterations > 0,
        ),
        Rule(
            f"self.mode != '{Mode.CANARY}' || self.objective.type != '{ObjectiveType.FIXED_CLOCK}'",
            f"mode must not be Canary with objective.type {ObjectiveType.FIXED_CLOCK}: there is no plan to try",
            lambda spec: spec.mode is not Mode.CANARY or spec.is_planned,
        ),
    )

    @property
    def pods(self) -> Workload | None:
        """See ``WorkSpec``."""
        return self.workload

    @property
    def is_planned(self) -> bool:
        """Whether the job runs plans; otherwise it has one clock, and neither pipeline nor profile count."""
        return self.objective.type is not ObjectiveType.FIXED_CLOCK

    @property
    def shape_known(self) -> bool:
        """Whether ``pipeline`` says what is to be planned for."""
        return self.is_planned and self.pipeline is not NO_PIPELINE

    def completed(self, name: str, shape: Pipeline | None) -> JobSpec:
        """The spec with what it may leave out.

        Args:
            name: of the PerseusJob.
            shape: as the training processes report it; None: they have not yet, or it is what the spec says.
        """
        if not self.is_planned:
            return self
        profile = self.profile
        if profile.is_own:
            profile = replace(profile, profile_ref=ProfileRef(name=name), online=profile.online or Online.default())
        return replace(self, profile=profile, pipeline=self.pipeline if shape is None else shape)

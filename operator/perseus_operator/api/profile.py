"""The part of a PerseusJob's spec that says where its profile is, or how it is measured."""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from perseus_core import keys
from perseus_core.units import ratio_from_percent
from perseus_operator.api.objective import PERCENT, PERCENT_RULE
from perseus_operator.api.schema import DNS_NAME, Rule, integer, nested, parse, text

MAX_BLOCKING_POWER_MW: Final = 2_000_000
MAX_NAME: Final = 253
"""Characters of an object's name."""
_WHOLE: Final = "-steps"
"""Ends the name of a profile of whole iterations, where the job's own is of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class ConfigMapRef:
    """The ConfigMap that stores the profile, in the namespace of the PerseusJob."""

    name: str = text("Name of the ConfigMap.", rule="the name of a ConfigMap", max_length=MAX_NAME, pattern=DNS_NAME)
    key: str = text(
        "Key that holds the CSV.",
        rule="a ConfigMap key",
        max_length=MAX_NAME,
        pattern=r"^[-._a-zA-Z0-9]+$",
        default=keys.PROFILE_KEY,
    )


@dataclass(frozen=True, kw_only=True)
class ProfileRef:
    """The PerseusProfile that stores the profile, in the namespace of the PerseusJob."""

    name: str = text(
        "Name of the PerseusProfile.", rule="the name of a PerseusProfile", max_length=MAX_NAME, pattern=DNS_NAME
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
    def is_shared(self) -> bool:
        """Whether what is measured is stored for other jobs too."""
        return self.profile_ref is not None and self.online is not None

    def of_whole_iterations(self, job: str) -> Profile:
        """Where a job has its profile whose training processes fit no pipeline: beside this one, so that none is taken
        for the other. It is measured even if this one is only read: nobody can have it stored before.

        Args:
            job: name of the PerseusJob, of the profile that is for it alone.
        """
        shared = self.profile_ref if self.is_shared else None
        name = (shared.name if shared is not None else job)[: MAX_NAME - len(_WHOLE)].rstrip("-.")
        return Profile(profile_ref=ProfileRef(name=name + _WHOLE), online=self.online or Online.default())

    @property
    def where(self) -> str:
        """The object that stores it, for people."""
        if self.config_map_ref is not None:
            return f"ConfigMap {self.config_map_ref.name}"
        return f"PerseusProfile {self.profile_ref.name}" if self.profile_ref is not None else "no object"


NO_PROFILE: Final = Profile()
"""Stands for a profile that the spec leaves out."""

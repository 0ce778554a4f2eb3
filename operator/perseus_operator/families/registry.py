"""Which family a PerseusJob is of, by its spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perseus_operator.api.job import JobSpec
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.families.fixed_clock.family import FixedClockFamily
from perseus_operator.families.training.family import TrainingFamily
from perseus_operator.jobs.family import Family, Surroundings


@dataclass(frozen=True)
class Kind:
    """One family: of which specs it is, and how it is made for a job."""

    serves: Callable[[JobSpec], bool]
    make: Callable[[Surroundings], Family]


FAMILIES: Final = (
    Kind(lambda spec: spec.objective.type is ObjectiveType.FIXED_CLOCK, FixedClockFamily),
    Kind(lambda _: True, TrainingFamily),
)
"""The first that serves a spec counts; the last serves every spec, and jobs without one."""

"""Which family a PerseusJob or a ServingPool is of, by its spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from perseus_core import keys
from perseus_operator.api.job import JobSpec
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.families.fixed_clock.family import FixedClockFamily
from perseus_operator.families.serving.family import ServingFamily
from perseus_operator.families.training.family import TrainingFamily
from perseus_operator.jobs.family import Family, Surroundings


@dataclass(frozen=True)
class Kind:
    """One family: of which specs it is, and how it is made for a job.

    Attributes:
        serves: of a spec of its type, whether it is the family's.
        make: the family for one job.
        spec: the type of spec that it serves.
        resource: the kind of the custom resource.
    """

    serves: Callable[[Any], bool]
    make: Callable[[Surroundings], Family]
    spec: type[Any] = JobSpec
    resource: str = keys.KIND


FAMILIES: Final = (
    Kind(lambda spec: spec.objective.type is ObjectiveType.FIXED_CLOCK, FixedClockFamily),
    Kind(lambda _: True, TrainingFamily),
    Kind(lambda _: True, ServingFamily, PoolSpec, keys.POOL_KIND),
)
"""Of the families of one kind of custom resource the first that serves a spec counts; the last serves every spec, and
objects without one."""


def kinds_of(kinds: Sequence[Kind], resource: str) -> Sequence[Kind]:
    """Return the families of one kind of custom resource, in order."""
    return [kind for kind in kinds if kind.resource == resource]

"""What one replica carries within the limits at its highest clock, from the models of its steps.

The planner's bounds say it (`perseus_solver.serving.planner`), for requests as they are now. A pool whose clocks are
not set has windows at one clock alone: they suffice, since nothing is asked of any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_core.serving import ServingLimits
from perseus_operator.families.serving.features.advice.arrivals import Kind
from perseus_solver.serving import StepModel, WattModel, Window
from perseus_solver.serving.planner import OperatingPoint


@dataclass(frozen=True)
class ReplicaModels:
    """Models of an engine's steps that hold at its highest clock.

    Attributes:
        times: of steps.
        watts: of all its GPUs; None: not measured.
    """

    times: StepModel
    watts: WattModel | None


@dataclass(frozen=True)
class CapacityWork:
    """What a replica carries is to be computed.

    Attributes:
        steps: of the engine, as far as they are known.
        windows: at the highest clock, to fit it anew; none: the steps that are known count.
        highest_mhz: of its GPUs.
        kind: of the requests.
        limits: that they were promised.
        flags: of the engine.
        prompts: it computes prompts alone.
    """

    steps: ReplicaModels | None
    windows: tuple[Window, ...]
    highest_mhz: int
    kind: Kind
    limits: ServingLimits
    flags: tuple[tuple[str, str], ...]
    prompts: bool = False


@dataclass(frozen=True)
class Capacity:
    """What a replica carries.

    Attributes:
        point: at the highest clock; watts are 0 where none were measured. None: that is not known.
        refusal: why; empty: it is.
        steps: the models that it rests on; None: no model explains the engine.
    """

    point: OperatingPoint | None = None
    refusal: str = ""
    steps: ReplicaModels | None = None


def without_watts(capacity: Capacity) -> bool:
    """Whether nothing is known of what a replica draws."""
    return capacity.steps is None or capacity.steps.watts is None

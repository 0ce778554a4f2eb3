"""What a GPU's driver holds it to beside clocks: workload power profiles, and power smoothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PowerPolicy:
    """As the driver of one GPU says it.

    Attributes:
        requested: names of the workload power profiles that somebody has asked for, ascending, such as ``MAX_Q``.
        enforced: those that the firmware follows; of several that contradict each other it follows one.
        floor_w: what power smoothing keeps the GPU at while a load ramps down, watts; 0: it is off, or not known.
        secondary_floor_w: what delayed power smoothing keeps an idle GPU at, watts; 0: likewise.
    """

    requested: tuple[str, ...] = ()
    enforced: tuple[str, ...] = ()
    floor_w: int = 0
    secondary_floor_w: int = 0

    def __str__(self) -> str:
        """As the log has it."""
        profiles = f"power profiles requested: {_named(self.requested)}, enforced: {_named(self.enforced)}"
        smoothed = f", power floors of {self.floor_w} and {self.secondary_floor_w} W" if self.floor_w else ""
        return profiles + smoothed


def _named(profiles: tuple[str, ...]) -> str:
    return ", ".join(profiles) or "none"

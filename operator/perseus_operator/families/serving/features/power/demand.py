"""What a pool needs now: the greatest load and draw of any replica in the last minutes.

Load is what engines say; draw is what the energy counters of their GPUs say to the agent. No claim on a PowerBudget
rests on the one without the other.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from perseus_core.serving import DEFAULT_CLOCKS
from perseus_core.units import mean_power_w
from perseus_operator.nodes.engines import EngineWindow

MINUTES: Final = 10
"""As long as attainment is counted: a load that came back within it was never gone."""


@dataclass
class _Minute:
    number: int
    running: float = 0.0
    waiting: int = 0
    watts: dict[int, float] = field(default_factory=dict)
    """The most that a replica drew, by the ceiling that held."""

    def window_seen(self, window: EngineWindow, held_mhz: int) -> None:
        """A replica did this, at no clock above this one."""
        self.running = max(self.running, window.running)
        self.waiting = max(self.waiting, window.waiting)
        if window.energy_mj is not None:
            watts = mean_power_w(window.energy_mj, window.time_us)
            self.watts[held_mhz] = max(self.watts.get(held_mhz, 0.0), watts)


class Demand:
    """The greatest seconds of the last minutes."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=MINUTES)

    def window_seen(self, window: EngineWindow, ceiling_mhz: int, wall_s: float) -> None:
        """A replica did this.

        Args:
            window: of it.
            ceiling_mhz: above which its agent lets no clock go; `DEFAULT_CLOCKS`: there is none.
            wall_s: the time.
        """
        number = math.floor(wall_s / 60.0)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        self._minutes[-1].window_seen(window, _held_mhz(window, ceiling_mhz))

    def time_passed(self, wall_s: float) -> None:
        """It is this time now: an engine that rests has no windows, and needs no more what it needed before."""
        while self._minutes and not 0 <= math.floor(wall_s / 60.0) - self._minutes[0].number < MINUTES:
            self._minutes.popleft()

    @property
    def running(self) -> float:
        """Requests that decoded at once at one replica, at most."""
        return max((minute.running for minute in self._minutes), default=0.0)

    @property
    def waiting(self) -> int:
        """Requests that waited at once at one replica, at most."""
        return max((minute.waiting for minute in self._minutes), default=0)

    def drawn_w(self, ceiling_mhz: int = DEFAULT_CLOCKS) -> float:
        """Return what a replica drew at most, in watts, while no clock was above a ceiling; 0: nothing was measured."""
        return max(
            (
                watts
                for minute in self._minutes
                for held_mhz, watts in minute.watts.items()
                if ceiling_mhz == DEFAULT_CLOCKS or DEFAULT_CLOCKS < held_mhz <= ceiling_mhz
            ),
            default=0.0,
        )


def _held_mhz(window: EngineWindow, ceiling_mhz: int) -> int:
    """The clock above which none was in force for certain; `DEFAULT_CLOCKS`: that is not known."""
    if not window.changed:
        return window.clock_mhz
    if window.default_us or window.mhz_us > ceiling_mhz * window.time_us:
        return DEFAULT_CLOCKS  # it began before the ceiling was in force
    return ceiling_mhz

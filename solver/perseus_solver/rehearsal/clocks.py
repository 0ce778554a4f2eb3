"""What every instruction takes, and what power it draws, at every clock of the problem.

A change that comes late or early leaves an instruction at the clock of another one, at which it may not have been
measured. Time and power are then interpolated between the nearest measured clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index, Ints
from perseus_solver.model.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class ClockTables:
    """Times and powers by table of options and clock.

    Attributes:
        mhz: int32[clocks], increasing; all clocks of the problem.
        time_s: float[tables, clocks], seconds of an instruction that runs at one clock throughout.
        power_w: float[tables, clocks], watts of the GPU while it runs.
        sets_clock: bool[tables], false for constant-time instructions, which take what they take at any clock.
    """

    mhz: Ints
    time_s: Floats
    power_w: Floats
    sets_clock: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> ClockTables:
        """Return the tables of a problem."""
        sets_clock = np.array([bool((options.frequency_mhz > 0).any()) for options in problem.options])
        measured = [options.frequency_mhz for options, sets in zip(problem.options, sets_clock, strict=True) if sets]
        mhz = np.unique(np.concatenate(measured)) if measured else np.zeros(1, dtype=np.int32)
        time_s = np.stack([np.interp(mhz, o.frequency_mhz[::-1], o.time_s[::-1]) for o in problem.options])
        power_w = np.stack(
            [np.interp(mhz, o.frequency_mhz[::-1], (o.energy_j / o.time_s)[::-1]) for o in problem.options]
        )
        return cls(mhz, time_s, power_w, sets_clock)

    def mixed_power_w(self, blocking_w: float) -> Floats:
        """Return the power where the GPUs of a stage compute at one clock, as the slowest does, and draw as at another.

        Those that are faster wait. Nothing draws as at a lower clock than that of the slowest.

        Args:
            blocking_w: power of a GPU that waits, watts.

        Returns:
            float[tables, clocks, clocks], by the clock of the slowest and the one at which the GPUs draw.
        """
        takes_s, drawn_s = self.time_s[:, :, None], self.time_s[:, None, :]
        mixed_w = blocking_w + (self.power_w[:, None, :] - blocking_w) * drawn_s / takes_s
        place = np.arange(len(self.mhz))
        power_w: Floats = np.where(place[None, :, None] < place, mixed_w, self.power_w[:, :, None])
        return power_w

    def positions(self, frequencies_mhz: np.ndarray) -> Index:
        """Return the positions of clocks in ``mhz``; 0 for those of constant-time instructions.

        Args:
            frequencies_mhz: int[plans, n], clocks of the problem, or 0.
        """
        return np.searchsorted(self.mhz, frequencies_mhz).astype(np.intp)

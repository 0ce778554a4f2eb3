"""By how much the demo's GPUs are faster than those they simulate, and what is seen of them in the time of the profile.

Instructions, launches, clock changes and the driver's calls all take a fraction of their time, at the same power; so
an iteration takes that fraction of its time and of its energy, and every share and every watt stays as it is. Operator
and agents are the production code in the machine's own time: to them these are fast GPUs. What the demo says is in the
time of the profile, so that it can be compared with it.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace

from perseus_core.units import j_from_mj, s_from_us
from perseus_solver.model.result import Frontier

_SCALED = ("time", "energy")


@dataclass(frozen=True)
class TimeScale:
    """Everything simulated is ``speed`` times as fast as the profile says."""

    speed: int

    def s(self, simulated_us: float) -> float:
        """Return seconds of the profile's time."""
        return self.speed * s_from_us(simulated_us)

    def j(self, simulated_mj: float) -> float:
        """Return joules that as many iterations take on GPUs of the profile."""
        return self.speed * j_from_mj(simulated_mj)

    def profile(self, text: str) -> str:
        """Return a profile's CSV as it is measured on the fast GPUs."""
        rows = csv.DictReader(io.StringIO(text))
        out = io.StringIO()
        writer = csv.DictWriter(out, rows.fieldnames or (), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row | {name: repr(float(row[name]) / self.speed) for name in _SCALED})
        return out.getvalue()

    def frontier(self, simulated: Frontier) -> Frontier:
        """Return a frontier of the fast GPUs in the profile's time."""
        rehearsed, factor = simulated.rehearsed, float(self.speed)
        return replace(
            simulated,
            time_s=factor * simulated.time_s,
            energy_j=factor * simulated.energy_j,
            energy_lower_bound_j=factor * simulated.energy_lower_bound_j,
            rehearsed=rehearsed
            and replace(
                rehearsed,
                p50_s=factor * rehearsed.p50_s,
                ideal_time_s=factor * rehearsed.ideal_time_s,
                ideal_energy_j=factor * rehearsed.ideal_energy_j,
            ),
        )

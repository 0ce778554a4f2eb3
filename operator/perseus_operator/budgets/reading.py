"""What was measured of a job's energy: like a meter's display, it only rises while one operator serves the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """All reports of one job together.

    Attributes:
        energy_j: of its GPUs, by their counters.
        gpu_s: GPU time that this is the energy of.
    """

    energy_j: float = 0.0
    gpu_s: float = 0.0

    def plus(self, energy_j: float, gpu_s: float) -> Reading:
        """The reading after one more report."""
        return Reading(self.energy_j + energy_j, self.gpu_s + gpu_s)

    def since(self, before: Reading | None) -> Reading:
        """What was added; all of it, if another operator has begun anew. None: there was no reading before."""
        if before is None:
            return Reading()
        if self.gpu_s < before.gpu_s or self.energy_j < before.energy_j:
            return self
        return Reading(self.energy_j - before.energy_j, self.gpu_s - before.gpu_s)

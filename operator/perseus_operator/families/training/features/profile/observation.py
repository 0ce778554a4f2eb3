"""Mode Observe: how a job runs at the clocks that its GPUs are at, and what predictions about it rest on.

Fields are read everywhere and changed only here, by one named method for each event: an iteration is observed, enough
of them are, the training starts again, a profile or an estimate is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.profile.reading import Reading

ITERATIONS: Final = 5
"""Iterations that are observed, after the first: as many as a sweep measures at each clock."""


@dataclass
class Observation:
    """What has been observed of a job."""

    observed: Reading | None = None
    """Time and energy of every kind of instruction; None: not enough iterations yet."""
    observed_iterations: int = 0
    obstacle: str = ""
    """Why the latest iteration could not be used; empty: it could."""
    basis: PlanBasis = PlanBasis.PROFILE
    basis_source: str = ""
    """The same in a clause."""

    def iteration_observed(self, iterations: int, obstacle: str) -> None:
        """So many iterations have been observed; ``obstacle`` says why the latest could not be used."""
        self.observed_iterations, self.obstacle = iterations, obstacle

    def completed(self, reading: Reading) -> None:
        """Enough iterations have been observed."""
        self.observed, self.obstacle = reading, ""

    def restarted(self) -> None:
        """The training starts again, or another program runs under the same name."""
        self.observed, self.observed_iterations, self.obstacle = None, 0, ""

    def basis_accepted(self, basis: PlanBasis, source: str) -> None:
        """Plans are made from this from now on."""
        self.basis, self.basis_source = basis, source

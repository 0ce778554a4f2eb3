"""The frontier of a job: the one in force, the one that agents are being sent, and what is being solved.

Fields are read everywhere and changed only here, by one named method for each event: a solve starts, succeeds, fails
and ends; a frontier is adopted or forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from perseus_operator.api.conditions import Explanation
from perseus_operator.solving.view import FrontierView, PlannedTimes

_AGAIN_S: Final = 5.0
_AGAIN_MOST_S: Final = 600.0
"""Pauses before a solver service is asked again whose answer was refused: they double."""


@dataclass
class SolveProgress:
    """How far the frontier is. ``fault`` is None while there is none."""

    frontier: FrontierView | None = None
    planned_times: PlannedTimes | None = None
    """What the frontier's plans say about single instructions."""
    coming: FrontierView | None = None
    """A refined frontier that agents are being sent; until they have it, the one in force serves."""
    coming_times: PlannedTimes | None = None
    basis: str = ""
    """Digest of what users gave for the frontier: its inputs without what was measured since."""
    solving: str | None = None
    """Digest of the inputs being solved."""
    solving_basis: str = ""
    """As ``basis``, of the inputs being solved."""
    solving_forgotten: bool = False
    """What is being solved says nothing about what is to be planned now."""
    fault: tuple[str, Explanation] | None = None
    """Digest of the inputs that could not be solved, and why."""
    again_at_s: float = math.inf
    """When these are to be solved again (monotonic); infinite: never."""
    refusals: int = 0
    """Answers in a row that were refused."""

    @property
    def refining(self) -> bool:
        """Whether the frontier in use is being solved again only for what was measured since: it stays valid."""
        return self.solving is not None and self.frontier is not None and self.solving_basis == self.basis

    def started(self, digest: str, basis: str) -> None:
        """The frontier of these inputs is being restored or solved."""
        self.solving, self.solving_basis, self.solving_forgotten = digest, basis, False

    def succeeded(self, frontier: FrontierView, planned_times: PlannedTimes) -> None:
        """There is a new frontier, which is to be adopted."""
        self.fault, self.coming, self.coming_times = None, frontier, planned_times
        self.again_at_s, self.refusals = math.inf, 0
        self.basis = self.solving_basis

    def adopted(self) -> None:
        """The coming frontier is in force."""
        self.frontier, self.planned_times = self.coming, self.coming_times
        self.coming = self.coming_times = None

    def failed(self, digest: str, fault: Explanation) -> None:
        """These inputs have no frontier; they are not tried again."""
        self.fault, self.again_at_s, self.refusals = (digest, fault), math.inf, 0

    def refused(self, digest: str, fault: Explanation, *, now_s: float) -> None:
        """What a solver service answered is not used; it is asked again after a pause."""
        again_at_s, refusals = now_s + min(_AGAIN_MOST_S, _AGAIN_S * 2.0**self.refusals), self.refusals + 1
        self.failed(digest, fault)
        self.again_at_s, self.refusals = again_at_s, refusals

    def ended(self) -> None:
        """Nothing is being solved any more."""
        self.solving = None

    def forgotten(self) -> None:
        """What was solved says nothing about what is to be planned now."""
        self.frontier = self.planned_times = self.coming = self.coming_times = None
        self.solving_forgotten = self.solving is not None

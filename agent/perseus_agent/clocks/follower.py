"""What runs on a GPU's thread between what was ordered and the clock: it says which clock is wanted now.

A rank follows its plan by marks and a timetable (``rank_follower``). Another kind of work that chooses its own clocks
implements the same protocol, and the thread of the GPU, its governor and its budget serve it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import StagePlan
from perseus_agent.clocks.telemetry import RankProcess
from perseus_core.marks import ClockControl
from perseus_proto.channel import IterationRecord


@dataclass(frozen=True)
class Finished:
    """An iteration that is over and whose successor has begun."""

    rank: RankProcess
    record: IterationRecord
    next_begin_us: int
    plan: StagePlan | None
    clock_changes: int
    control: ClockControl | None = None
    machine_clock: bool = False
    """Its times are of the machine's clock."""
    own_time: bool = False
    """As in the rank's hello."""
    kinds: Sequence[int] = ()
    """Of the instructions of the rank's schedule, as ``InstructionKind``."""


class Follower(Protocol):
    """What drives one GPU. Only that GPU's thread calls it, and it must return within milliseconds."""

    next_look_us: int
    """When to ask again without a ring, in microseconds of the machine's clock; 0: not at all."""
    due: bool
    """Whether ``collect_part`` may find something."""
    sample_s: float
    """How often the GPU's energy and clock are read at most, where that is less often than for others: beside looks,
    which come about as often. 0: as often as for others, at any time."""
    urgent: bool
    """Whether what ``look`` returned last goes ahead of other calls of the node's driver."""

    @property
    def job_uid(self) -> str:
        """Of the job whose lease lets it drive the GPU."""
        ...

    @property
    def bell(self) -> int:
        """A descriptor that becomes readable when it is to be asked."""
        ...

    @property
    def plan(self) -> StagePlan | None:
        """What is followed now, of whose clocks changes are measured; None: the default clocks, or no plan."""
        ...

    def look(self, writes: int, now_us: int, lead: Lead) -> int | None:
        """Return the clock to ask for now, MHz; None: the default clocks.

        Args:
            writes: the device's clock changes so far.
            now_us: now, by the machine's clock.
            lead: how long a change takes.
        """
        ...

    def selection_changed(self) -> None:
        """React to other orders. ``look`` is called afterwards."""
        ...

    def collect_part(self, writes: int, now_us: int | None = None) -> tuple[Sequence[Finished], bool]:
        """Do a part, of milliseconds at most, of what can wait. Returns iterations that are over, and whether there may
        be another part.
        """
        ...

    def leave(self, writes: int, now_us: int | None = None) -> Sequence[Finished]:
        """Ring no more. Returns the iterations that are not reported yet."""
        ...

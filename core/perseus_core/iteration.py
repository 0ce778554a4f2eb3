"""What a rank did in one iteration: agents measure it, the wire carries it, and the operator makes iterations of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from perseus_core.evidence import Evidence
from perseus_core.rank import RankId


@dataclass(frozen=True)
class IterationReport:
    """What one rank did in one iteration, or the ranks of a stage together.

    Attributes:
        dp, stage, tp: of the rank; of several the first.
        iteration: its number, from 0.
        iteration_time_us: to the begin of the next one.
        compute_span_us: to the end of the last instruction.
        energy_mj: of the iteration; None: the GPU has no counter.
        point: of the plan that was followed; None: default clocks.
        durations_us: of each instruction in schedule order; empty if the process did not follow its schedule.
        instruction_energies_mj: of each instruction, as a mean over this and earlier iterations under the same plan and
            point.
        energy_iterations: iterations in that mean.
        quiet_us, quiet_mj: time and energy of waits within which the energy counter moved.
        evidence: how the clocks followed the plan; None: the agent does not say.
        own_time: the span ends before the rank waits for other pipelines.
        together: tensor-parallel ranks of the stage that this describes together: times are the longest, energy is the
            sum, and energies of single instructions are not known. Empty: it describes one rank.
        gpu_uuid: of the rank's GPU; of several the first.
        plan_id: of the plan that was followed; empty: default clocks.
        clock_changes: writes of the clock; of several ranks the sum.
    """

    dp: int
    stage: int
    tp: int
    iteration: int
    iteration_time_us: int
    compute_span_us: int
    energy_mj: int | None
    point: int | None
    durations_us: Sequence[int] = ()
    instruction_energies_mj: Sequence[int] = ()
    energy_iterations: int = 0
    quiet_us: int = 0
    quiet_mj: int = 0
    evidence: Evidence | None = None
    own_time: bool = True
    together: tuple[int, ...] = ()
    gpu_uuid: str = ""
    plan_id: str = ""
    clock_changes: int = 0

    @cached_property
    def rank_id(self) -> RankId:
        """The reporting rank; of several the first."""
        return RankId(self.dp, self.stage, self.tp)

    @property
    def rank_ids(self) -> Sequence[RankId]:
        """Every rank that this describes."""
        return [RankId(self.dp, self.stage, tp) for tp in self.together] if self.together else (self.rank_id,)

    @property
    def numbers(self) -> int:
        """How many it carries of single instructions."""
        return len(self.durations_us) + len(self.instruction_energies_mj)

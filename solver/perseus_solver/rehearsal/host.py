"""The control that followed the host's marks: the next clock is set when the host marks the end of an instruction.

It is here to show what design note 0019 replaced, and what a job loses whose marks are those of the host.
"""

from __future__ import annotations

import itertools

import numpy as np

from perseus_solver.kinds import Floats, Index, Kind
from perseus_solver.model.problem import Problem
from perseus_solver.rehearsal.calls import Start
from perseus_solver.rehearsal.execution import Begun
from perseus_solver.rehearsal.hardware import Hardware, Marks


class HostEnds:
    """Asks for the clock of the next instruction when the host marks the end of the one before.

    Hosts that wait for the GPU mark right (`Marks.GPU`), or wait after each transfer only and mark the end when the
    instruction is launched (`Marks.SYNCHRONISED`, as Megatron's 1F1B does). Others launch until the queue is full
    (`Marks.RUN_AHEAD`): a launch then waits until the GPU has reached the kernel one queue before it.

    Attributes:
        slots: int[n], requests of each instruction.
        start: the clocks with which a run begins: the highest of each stage.
    """

    def __init__(self, problem: Problem, hardware: Hardware, planned: Index) -> None:
        """Prepare the marks of all instructions.

        Args:
            problem: the problem.
            hardware: who marks, and how fast hosts launch.
            planned: int[n, plans], positions of clocks; negative where an instruction sets none.
        """
        n = len(planned)
        kinds = np.array([int(options.kind) for options in problem.options])[problem.option_of]
        kernels = np.array([hardware.kernels[Kind(kind)] for kind in kinds.tolist()], dtype=np.float64)
        self._marks, self._offset = hardware.marks, problem.stage_offset.tolist()
        self._launch_s = kernels * hardware.launch_s
        highest = np.stack([planned[low:high].max(axis=0) for low, high in itertools.pairwise(self._offset)])
        none = np.zeros((0, *highest.shape))
        self.start = Start(np.maximum(highest, 0), none, none.astype(np.intp))
        self._next = _next_clocks(planned, self._offset)
        owners: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        for low, high in itertools.pairwise(self._offset):
            self._place(owners, np.arange(low, high), kernels[low:high], hardware.launch_queue)
        self.slots = np.array([len(own) for own in owners], dtype=np.intp)
        shape = (int(self.slots.max(initial=0)), n)
        self._marked = np.zeros(shape, dtype=np.intp)
        self._share = np.zeros(shape)
        self._used = np.zeros(shape, dtype=np.bool_)
        for row, own in enumerate(owners):
            for slot, (marked, share) in enumerate(own):
                self._marked[slot, row], self._share[slot, row], self._used[slot, row] = marked, share, True
        self._host_s: dict[int, Floats] = {}

    def _place(self, owners: list[list[tuple[int, float]]], rows: Index, kernels: Floats, queue: int) -> None:
        """Assign each mark to the instruction for which it waits, and to the share of that which must be done."""
        if self._marks is not Marks.RUN_AHEAD:
            for i, row in enumerate(rows.tolist()):
                after = int(rows[(i + 1) % len(rows)])
                owners[after if self._marks is Marks.GPU else row].append((row, 0.0))
            return
        done = np.cumsum(kernels)
        for i, row in enumerate(rows.tolist()):
            reached = done[i] - queue  # kernels that the GPU must have done before the last is launched
            j = int(done.searchsorted(reached, side="left"))
            share = (reached - (done[j] - kernels[j])) / kernels[j]
            owners[int(rows[j])].append((row, float(max(share, -1.0)) if reached > 0 else -1.0))

    def due(self, slot: int, begun: Begun) -> tuple[Floats, Index, np.ndarray]:
        """Return when each request of a slot is made, for which clock, and where there is one."""
        rows = begun.rows
        marked, used = self._marked[slot, rows], self._used[slot, rows]
        clock = self._next[marked][:, :, None]
        made = used[:, None, None] & (clock >= 0)
        if self._marks is Marks.GPU:
            return begun.ended_s, clock, made
        launch_s = self._launch_s[marked][:, None, None]
        if self._marks is Marks.SYNCHRONISED:
            return begun.begin_s + np.minimum(launch_s, begun.takes_s), clock, made
        share = self._share[slot, rows][:, None, None]
        reached_s = np.where(share >= 0, begun.begin_s + share * begun.takes_s, -np.inf)
        due_s = np.empty_like(begun.begin_s)
        for k, (row, stage) in enumerate(zip(rows.tolist(), begun.stages.tolist(), strict=True)):
            if row == self._offset[stage] and slot == 0:
                self._host_s[stage] = np.zeros_like(begun.begin_s[k])  # the host begins the iteration with the GPU
            if used[k]:
                self._host_s[stage] = np.maximum(self._host_s[stage] + launch_s[k], reached_s[k])
            due_s[k] = self._host_s[stage]
        return due_s, clock, made


def _next_clocks(planned: Index, offset: list[int]) -> Index:
    """Return the clock of the next instruction that sets one, [n, plans], around the end of each stage's iteration."""
    following = np.full_like(planned, -1)
    for low, high in itertools.pairwise(offset):
        own = planned[low:high]
        sets = np.flatnonzero((own >= 0).any(axis=1))
        if len(sets):
            at = np.searchsorted(sets, np.arange(1, high - low + 1)) % len(sets)
            following[low:high] = own[sets[at]]
    return following

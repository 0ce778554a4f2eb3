"""Controls to compare the agent's with: none, changes without latency, and changes at marks of the host or the GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from tests.execution.executor import Control

MIN_SWITCH_INTERVAL_S: Final = 0.002


class DefaultClocks(Control):
    """Nothing is ever set."""


class Ideal(Control):
    """Every instruction runs at its planned clock: changes are free and exact."""

    def gpu_begins(self, number: int, now_s: float) -> None:
        pipeline = self.executor.pipeline
        self.executor.set_clock(pipeline.rank_of[number], pipeline.plan[number])


class HostMarks(Control):
    """Sets the next instruction's clock when the host marks the end of one; the newest target counts."""

    def start(self) -> None:
        pipeline, gpus = self.executor.pipeline, self.executor.machine.gpus
        self._wanted = [pipeline.default_mhz] * pipeline.ranks
        self._applied = [[pipeline.default_mhz] * gpus for _ in range(pipeline.ranks)]
        self._busy = [[False] * gpus for _ in range(pipeline.ranks)]
        self._following = list(range(1, len(pipeline.plan) + 1))
        for first, end in pairwise(pipeline.offsets):
            self._following[end - 1] = first
        for rank in range(pipeline.ranks):
            self._want(rank, pipeline.plan[pipeline.offsets[rank]])

    def host_ended(self, number: int, now_s: float) -> None:
        pipeline = self.executor.pipeline
        self._want(pipeline.rank_of[number], pipeline.plan[self._following[number]])

    def _want(self, rank: int, mhz: int) -> None:
        self._wanted[rank] = mhz
        for gpu in range(self.executor.machine.gpus):
            self._send(rank, gpu)

    def _send(self, rank: int, gpu: int) -> None:
        mhz = self._wanted[rank]
        if not self._busy[rank][gpu] and mhz != self._applied[rank][gpu]:
            self._busy[rank][gpu] = True
            self._applied[rank][gpu] = mhz
            ended_s = self.executor.call(rank, gpu, mhz)
            if self.executor.machine.driver is not None:
                ended_s = max(ended_s, self.executor.now_s + MIN_SWITCH_INTERVAL_S)
            self.executor.at(ended_s, self._returned, rank, gpu)

    def _returned(self, rank: int, gpu: int) -> None:
        self._busy[rank][gpu] = False
        self._send(rank, gpu)


class GpuMarks(HostMarks):
    """Sets the next instruction's clock when the GPU has ended one: marks at the right time, without a timetable."""

    def host_ended(self, number: int, now_s: float) -> None:
        """The host does not count."""

    def gpu_ended(self, number: int, now_s: float) -> None:
        super().host_ended(number, now_s)

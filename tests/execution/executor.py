"""Execution of a pipeline in virtual time: ``Executor(pipeline, machine, control).run(iterations)`` gives an Outcome.

It shares no code with ``perseus_solver.rehearsal``, which it judges. Instructions on GPUs, launches on hosts and
calls to drivers are events in virtual seconds.

An instruction begins when its rank is free, its inputs have arrived and its host has launched it. It goes on at the old
clock until a new one is in effect, so one instruction may run at several clocks. Where an instruction would exceed the
power limit, its GPU runs below the clock that is set. A step ends on all ranks together, as
they reduce gradients, and the next begins after the problem's overhead. Durations scatter; the same seed draws the same
for each control, so that controls are compared on the same iterations. Launches are taken to be faster than kernels: a
GPU never starves within an instruction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from tests.execution.machine import Machine, Outcome
from tests.execution.pipeline import Pipeline

from perseus_sim.gpus.switching import DriverLock, Switches

_DONE: Final = 1e-12
_IDLE: Final = -1


class Control:
    """Decides about clocks. The executor calls what a subclass overrides; times are virtual seconds."""

    executor: Executor

    def start(self) -> None:
        """The run begins; ``executor`` is set."""

    def gpu_begins(self, number: int, now_s: float) -> None:
        """An instruction begins on its GPU; what is set now holds from its beginning."""

    def gpu_ended(self, number: int, now_s: float) -> None:
        """An instruction has ended on its GPU."""

    def gpu_step_begun(self, iteration: int, now_s: float) -> None:
        """A step begins on all GPUs."""

    def gpu_step_ended(self, iteration: int, now_s: float) -> None:
        """A step has ended on all GPUs."""

    def host_step_begun(self, rank: int, iteration: int, now_s: float) -> None:
        """A host begins a step."""

    def host_begun(self, number: int, now_s: float) -> None:
        """A host begins to launch an instruction."""

    def host_ended(self, number: int, now_s: float) -> None:
        """A host has launched an instruction."""

    def host_step_ended(self, rank: int, iteration: int, now_s: float) -> None:
        """A host has launched a step."""


class _Rank:
    """State of one GPU and its host."""

    __slots__ = (
        "base", "begun_s", "blocked", "clocks", "count", "effective", "factor", "first", "generation", "host_index",
        "host_iteration", "index", "iteration", "launched", "left", "limited", "number", "power_w", "running",
        "since_s", "span_s", "wait",
    )  # fmt: skip

    def __init__(self, number: int, first: int, count: int, clocks: list[int]) -> None:
        self.number, self.first, self.count, self.clocks = number, first, count, clocks
        self.running = _IDLE
        self.index = 0  # of the next instruction on the GPU
        self.iteration = 0
        self.left = self.since_s = self.span_s = self.power_w = 0.0
        self.factor = 1.0
        self.limited = False  # a GPU is held below its clock by the power limit
        self.generation = 0
        self.effective = [0] * len(clocks)  # number of the call whose clock is in effect
        self.host_iteration = self.host_index = 0
        self.launched = 0  # kernels, ever
        self.blocked = ""  # what the host waits for: "sync", "step", "queue", "end"
        self.wait = 0  # the kernel that must have ended
        self.base = 0  # kernels before the present iteration of the GPU
        self.begun_s: list[float] = [0.0] * count


class Executor:
    """One run."""

    def __init__(self, pipeline: Pipeline, machine: Machine, control: Control) -> None:
        self.pipeline = pipeline
        self.machine = machine
        self.now_s = 0.0
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self.ranks = [
            _Rank(rank, first, end - first, [pipeline.default_mhz] * machine.gpus)
            for rank, (first, end) in enumerate(pairwise(pipeline.offsets))
        ]
        self.iteration = 0
        self._iterations = 0
        self._missing: list[int] = []
        self._open = False
        self._ended_ranks = 0
        self._factors: list[float] = []
        self._step_s = self._busy_s = self._work_j = self._astray_s = self._late_s = self._lead_s = 0.0
        self._limited_s = 0.0
        self._calls = self._counted_calls = 0
        hosts, problem = machine.hosts, pipeline.problem
        self._kernels = hosts.kernels(problem) if hosts else []
        self._waits = hosts.waits(problem) if hosts else []
        self._kernels_before = [
            [0, *accumulate(self._kernels[rank.first : rank.first + rank.count])] if hosts else []
            for rank in self.ranks
        ]
        driver = machine.driver
        self._switches = [Switches(driver, machine.seed * 1_000 + r) for r in range(pipeline.ranks)] if driver else []
        self._locks = [DriverLock(driver) if driver else None for _ in self.ranks]
        self.control = control
        control.executor = self
        own, none = type(control), Control
        self._on_begin = control.gpu_begins if own.gpu_begins is not none.gpu_begins else None
        self._on_end = control.gpu_ended if own.gpu_ended is not none.gpu_ended else None

    # ------------------------------------------------------------------------------------------ for controls

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call later, at a moment that is not in the past."""
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, action, arguments))

    def set_clock(self, rank: int, mhz: int) -> None:
        """Change the clock of all GPUs of a rank at once."""
        for gpu in range(self.machine.gpus):
            self._reclock(self.ranks[rank], gpu, mhz)

    def call(self, rank: int, gpu: int, mhz: int) -> float:
        """Call the driver. Returns when the call ends; the clock follows when it is in effect."""
        self._calls += 1
        lock = self._locks[rank]
        if lock is None:
            self._effect(rank, gpu, mhz, self._calls)
            return self.now_s
        switch = self._switches[rank].draw(mhz)
        begin_s = lock.acquire(self.now_s, switch.call_s)
        self.at(begin_s + switch.latency_s, self._effect, rank, gpu, mhz, self._calls)
        return begin_s + switch.call_s

    def effective_mhz(self, rank: int, gpu: int) -> float:
        """The clock at which a GPU runs now: the power limit may hold it below the one that was set."""
        state = self.ranks[rank]
        mhz = state.clocks[gpu]
        return mhz if state.running == _IDLE else self.pipeline.curve_of[state.running].effective_mhz(mhz)

    # ----------------------------------------------------------------------------------------------- the run

    def run(self, iterations: int) -> Outcome:
        """Execute so many iterations from now on."""
        self._iterations = iterations
        self.control.start()
        self._begin_step()
        events, pop = self._events, heapq.heappop
        while events and len(self.outcome.time_s) < iterations:
            self.now_s, _, action, arguments = pop(events)
            action(*arguments)
        return self.outcome

    def _begin_step(self) -> None:
        self._missing = self.pipeline.waits_for.copy()
        self._open, self._ended_ranks = True, 0
        noise = self.machine.noise
        if noise:
            draws = np.random.default_rng((self.machine.seed, self.iteration)).normal(0.0, noise, len(self._missing))
            self._factors = np.exp(draws).tolist()
        else:
            self._factors = [1.0] * len(self._missing)
        self.control.gpu_step_begun(self.iteration, self.now_s)
        hosts = self.machine.hosts
        for rank in self.ranks:
            rank.index, rank.iteration = 0, self.iteration
            rank.base = self.iteration * self._kernels_before[rank.number][-1] if hosts else 0
        for rank in self.ranks:
            if hosts and (self.iteration == 0 or rank.blocked == "step"):
                self._host_step(rank)
            self._try(rank)

    def _end_step(self) -> None:
        outcome, begun_s = self.outcome, self._step_s
        self._step_s = now_s = self.now_s
        waiting_s = self.pipeline.ranks * (now_s - begun_s) - self._busy_s
        outcome.time_s.append(now_s - begun_s)
        outcome.energy_j.append(self._work_j + self.pipeline.problem.blocking_power_w * waiting_s)
        outcome.changes.append((self._calls - self._counted_calls) / self.machine.gpus)
        outcome.astray.append(self._astray_s / self._busy_s)
        outcome.late.append(self._late_s / self._busy_s)
        outcome.limited.append(self._limited_s / self._busy_s)
        outcome.lead_s.append(self._lead_s / len(self._missing))
        self._counted_calls = self._calls
        self._busy_s = self._work_j = self._astray_s = self._late_s = self._limited_s = self._lead_s = 0.0
        self.iteration += 1
        self._begin_step()

    # -------------------------------------------------------------------------------------------------- GPUs

    def _try(self, rank: _Rank) -> None:
        """Begin the next instruction of a rank if nothing is missing."""
        index = rank.index
        number = rank.first + index
        if index == rank.count or not self._open or rank.running != _IDLE or self._missing[number]:
            return
        if self.machine.hosts:
            if rank.host_iteration == rank.iteration and rank.host_index == index:
                if rank.blocked != "sync":
                    return  # the host has not come so far
                self._host_begin(rank)
            self._lead_s += self.now_s - rank.begun_s[index]
        if self._on_begin:
            self._on_begin(number, self.now_s)
        rank.running, rank.left, rank.since_s, rank.factor = number, 1.0, self.now_s, self._factors[number]
        rank.index = index + 1
        self._pace(rank)

    def _pace(self, rank: _Rank) -> None:
        """Continue the running instruction at the clock in effect."""
        curve, clocks = self.pipeline.curve_of[rank.running], rank.clocks
        time_s, rank.power_w = curve.at(clocks[0])
        if len(clocks) > 1 and clocks.count(clocks[0]) < len(clocks):
            found = [curve.at(mhz) for mhz in clocks]
            time_s = max(one_s for one_s, _ in found)
            blocking_w = self.pipeline.problem.blocking_power_w
            work_j = sum(one_s * power_w + (time_s - one_s) * blocking_w for one_s, power_w in found)
            rank.power_w = work_j / time_s / len(clocks)
        fastest = max(clocks)
        rank.limited = curve.effective_mhz(fastest) < fastest
        rank.span_s = time_s * rank.factor
        rank.generation += 1
        self._serial += 1
        end_s = self.now_s + rank.left * rank.span_s
        heapq.heappush(self._events, (end_s, self._serial, self._end, (rank, rank.generation)))
        if rank.blocked == "queue":
            self._await_kernel(rank)

    def _spend(self, rank: _Rank) -> None:
        """Account for the running instruction up to now."""
        spent_s = self.now_s - rank.since_s
        rank.since_s = self.now_s
        self._busy_s += spent_s
        self._work_j += spent_s * rank.power_w
        if rank.limited:
            self._limited_s += spent_s
        planned = self.pipeline.plan[rank.running]
        clocks = rank.clocks
        if clocks.count(planned) < len(clocks):
            self._astray_s += spent_s
            if min(clocks) < planned:
                self._late_s += spent_s
        if rank.span_s:
            rank.left -= spent_s / rank.span_s

    def _effect(self, rank: int, gpu: int, mhz: int, call: int) -> None:
        state = self.ranks[rank]
        if call > state.effective[gpu]:  # an older call that takes effect later has been replaced
            state.effective[gpu] = call
            self._reclock(state, gpu, mhz)

    def _reclock(self, rank: _Rank, gpu: int, mhz: int) -> None:
        if mhz == rank.clocks[gpu]:
            return
        if rank.running != _IDLE:
            self._spend(rank)
        rank.clocks[gpu] = mhz
        if rank.running != _IDLE:
            self._pace(rank)

    def _end(self, rank: _Rank, generation: int) -> None:
        if generation != rank.generation:
            return  # its clock has changed since
        self._spend(rank)
        number, rank.running, rank.left = rank.running, _IDLE, 0.0
        if self._on_end:
            self._on_end(number, self.now_s)
        missing, rank_of = self._missing, self.pipeline.rank_of
        for after, delay_s in self.pipeline.after[number]:
            if delay_s:
                self.at(self.now_s + delay_s, self._arrive, after)
                continue
            missing[after] -= 1
            if not missing[after]:
                self._try(self.ranks[rank_of[after]])
        if rank.blocked == "queue":
            self._await_kernel(rank)
        if number == rank.first + rank.count - 1:
            self._ended_ranks += 1
            if self._ended_ranks == len(self.ranks):
                self._open = False
                self.control.gpu_step_ended(self.iteration, self.now_s)
                self.at(self.now_s + self.pipeline.problem.overhead_s, self._end_step)
        else:
            self._try(rank)

    def _arrive(self, number: int) -> None:
        self._missing[number] -= 1
        if not self._missing[number]:
            self._try(self.ranks[self.pipeline.rank_of[number]])

    # ------------------------------------------------------------------------------------------------- hosts

    def _host_step(self, rank: _Rank) -> None:
        rank.blocked = ""
        self.control.host_step_begun(rank.number, rank.host_iteration, self.now_s)
        self._host_next(rank)

    def _host_next(self, rank: _Rank) -> None:
        """The host comes to an instruction: it begins, or waits for its GPU to be ready for it."""
        if not self._waits[rank.first + rank.host_index]:
            self._host_begin(rank)
            self._try(rank)
        else:
            rank.blocked = "sync"
            if rank.host_iteration == rank.iteration and rank.host_index == rank.index:
                self._try(rank)

    def _host_begin(self, rank: _Rank) -> None:
        rank.blocked = "launching"
        index = rank.host_index
        number = rank.first + index
        rank.begun_s[index] = self.now_s
        self.control.host_begun(number, self.now_s)
        rank.host_index = index + 1
        kernels = self._kernels[number]
        rank.launched += kernels
        hosts = self.machine.hosts
        assert hosts is not None
        rank.wait = rank.launched - hosts.queue
        self.at(self.now_s + kernels * hosts.launch_s, self._host_launched, rank)

    def _host_launched(self, rank: _Rank) -> None:
        if self._kernels_ended(rank) >= rank.wait - _DONE:
            self._host_end(rank)
        else:
            rank.blocked = "queue"
            self._await_kernel(rank)

    def _kernels_ended(self, rank: _Rank) -> float:
        """How many kernels the GPU has ended; the running instruction's in proportion."""
        before = self._kernels_before[rank.number]
        if rank.running == _IDLE:
            return rank.base + before[rank.index]
        begun_s, span_s = rank.since_s, rank.span_s
        done = 1 - rank.left + ((self.now_s - begun_s) / span_s if span_s else 0.0)
        return rank.base + before[rank.index - 1] + done * self._kernels[rank.running]

    def _await_kernel(self, rank: _Rank) -> None:
        """Let the host continue when the kernel that it waits for has ended, if that is within what runs now."""
        before, wait = self._kernels_before[rank.number], rank.wait - rank.base
        if rank.running == _IDLE:
            if before[rank.index] >= wait:
                self._host_continue(rank, None)
            return
        index = rank.index - 1
        if not before[index] < wait <= before[index + 1]:
            if wait <= before[index]:
                self._host_continue(rank, None)
            return
        share = (wait - before[index]) / (before[index + 1] - before[index])
        left = max(0.0, share - (1 - rank.left))
        self.at(self.now_s + left * rank.span_s, self._host_continue, rank, rank.generation)

    def _host_continue(self, rank: _Rank, generation: int | None) -> None:
        if rank.blocked == "queue" and generation in (None, rank.generation):
            self._host_end(rank)

    def _host_end(self, rank: _Rank) -> None:
        rank.blocked = ""
        number = rank.first + rank.host_index - 1
        self.control.host_ended(number, self.now_s)
        if rank.host_index < rank.count:
            self._host_next(rank)
            return
        self.control.host_step_ended(rank.number, rank.host_iteration, self.now_s)
        rank.host_iteration += 1
        rank.host_index = 0
        hosts = self.machine.hosts
        if rank.host_iteration < self._iterations and hosts is not None:
            if hosts.step_waits:
                rank.blocked = "step"
                if rank.host_iteration == self.iteration and self._open:
                    self._host_step(rank)
            else:
                self._host_step(rank)

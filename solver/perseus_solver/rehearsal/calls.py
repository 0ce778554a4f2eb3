"""The calls to the driver, and the clocks that are in effect because of them, for all stages, plans and samples.

Calls of a GPU follow each other. A call that has to wait is made with the newest target, as agents do, so at most one
waits. Changes come into effect in the order of their calls, however long each takes.

The GPUs of a stage that share a driver's lock change one after another, and compute as fast as the slowest. A rise
counts from the last of them and a fall from the first, but what they draw changes with each. So such a change is two
steps: one of the speed, and one of the power, when one of them has changed. Each sample follows the power of one GPU,
all in their turn: their mean would lie in a wait in which most of them do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index

_BOTH, _SPEED, _POWER = 0, 1, 2
"""What a step of a change is in effect for."""


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """How long changes take, by the clock that is changed to.

    Attributes:
        p50_s, sigma: float[clocks], median, seconds, and standard deviation of the logarithm.
        call_s, call_sigma: the same of the driver's calls.
    """

    p50_s: Floats
    sigma: Floats
    call_s: float
    call_sigma: float


@dataclass(frozen=True, slots=True, eq=False)
class Takes:
    """How long changes take from the begin of the first call until the first of a stage's GPUs has the new clock, until
    the last has it, until the GPU that a sample follows has it, and until the last call is over; seconds, any shape.
    """

    first_s: Floats
    last_s: Floats
    one_s: Floats
    calls_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Luck:
    """Which changes are slow.

    Attributes:
        normal: float[..., gpus], of the GPUs of a stage that change together, one after another: how slow each is.
        latencies: what that means in seconds.
    """

    normal: Floats
    latencies: Latencies

    def of(self, slot: int, rows: Index) -> Luck:
        """Return that of a slot of some instructions."""
        return Luck(self.normal[slot, rows], self.latencies)

    def takes(self, at: Index, clock: Index) -> Takes:
        """Return how long changes to some clocks take; ``at`` are places in ``normal``, its last axis left out."""
        own, latencies = self.normal.reshape(-1, self.normal.shape[-1])[at], self.latencies
        each_s = latencies.p50_s[clock][:, None] * np.exp(latencies.sigma[clock][:, None] * own)
        # Calls scatter as changes do, slow ones with slow ones, and each keeps those behind it waiting.
        calls_s = (latencies.call_s * np.exp(latencies.call_sigma * own)).cumsum(axis=1)
        each_s[:, 1:] += calls_s[:, :-1]
        samples, gpus = self.normal.shape[-2:]
        one_s = each_s[np.arange(len(at)), at % samples % gpus]
        return Takes(each_s.min(axis=1), each_s.max(axis=1), one_s, calls_s[:, -1])


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The clocks with which a run begins.

    Attributes:
        clock: int[stages, plans], positions of the clocks in effect.
        effect_s, target: [changes, stages, plans], when changes that are on their way come into effect, in order, and
            to which clocks; infinite where there is none.
    """

    clock: Index
    effect_s: Floats
    target: Index


class Calls:
    """The state of every GPU's clock. GPUs are numbered over [stages, plans, samples].

    Attributes:
        made: float[plans, samples], calls of the current iteration.
    """

    def __init__(self, start: Start, samples: int, *, one_by_one: bool) -> None:
        """Begin a run.

        Args:
            start: the clocks in effect, and on their way.
            samples: number of samples.
            one_by_one: the GPUs of a stage change one after another.
        """
        stages, plans = start.clock.shape
        self._shape = stages, plans, samples
        self.steps = 2 if one_by_one else 1
        coming = np.isfinite(start.effect_s).sum(axis=0)
        newest = np.take_along_axis(np.concatenate([start.clock[None], start.target]), coming[None], axis=0)[0]
        never = np.full((1, stages, plans), -np.inf)
        last_s = np.take_along_axis(np.concatenate([never, start.effect_s]), coming[None], axis=0)[0]
        self._clock, self._asked, self._tail, self._last_s = (
            np.repeat(values.ravel(), samples) for values in (start.clock, newest, coming, last_s)
        )
        self._power = self._clock.copy()
        self._head = np.zeros_like(self._tail)
        self._called_s, self._free_s = (np.full(self._tail.shape, -np.inf) for _ in range(2))
        self._gpu = np.arange(self._tail.size)
        room = np.concatenate([start.effect_s, -never]), np.concatenate([start.target, start.clock[None]])
        self._effect_s, self._target = (np.repeat(values.ravel(), samples) for values in room)
        self._part = np.full(self._target.shape, _BOTH)
        self._next_s = self._effect_s[self._gpu]
        self.made = np.zeros((plans, samples))

    def renew(self, capacity: int, elapsed_s: Floats) -> None:
        """Begin an iteration: count times from its begin, and make room for its calls.

        Args:
            capacity: largest number of calls that a stage may make in it.
            elapsed_s: float[plans, samples], duration of the iteration before.
        """
        size, elapsed = self._gpu.size, np.tile(elapsed_s.ravel(), self._shape[0])
        pending = int((self._tail - self._head).max(initial=0))
        shape = pending + self.steps * capacity + 1, size
        effect_s, target, part = np.full(shape, np.inf), np.zeros(shape, dtype=np.intp), np.full(shape, _BOTH)
        for k in range(pending):
            at = np.minimum(self._head + k, self._tail) * size + self._gpu  # the place behind the last is empty
            effect_s[k], target[k], part[k] = self._effect_s[at] - elapsed, self._target[at], self._part[at]
        self._tail -= self._head
        self._head[:] = 0
        self._called_s -= elapsed
        self._free_s -= elapsed
        self._last_s -= elapsed
        self._effect_s, self._target, self._part = effect_s.ravel(), target.ravel(), part.ravel()
        self._next_s = effect_s[0].copy()
        self.made = np.zeros(self._shape[1:])

    def of(self, stages: Index) -> StageCalls:
        """Return the calls of some stages, no stage twice."""
        return StageCalls(self, stages)


class StageCalls:
    """The calls of the stages of one level; arrays are [stages of the level × plans × samples], in that order.

    Attributes:
        clock: positions of the clocks in effect.
        power: positions of the clocks at which the GPUs draw power in the mean.
        next_s: when the next change comes into effect; infinite where none is on its way.
    """

    def __init__(self, calls: Calls, stages: Index) -> None:
        self._calls = calls
        self._gpu = calls._gpu.reshape(calls._shape)[stages].ravel()
        self.clock, self.power = calls._clock[self._gpu], calls._power[self._gpu]
        self.next_s = calls._next_s[self._gpu]

    def ask(self, due_s: Floats, target: Index, wanted: np.ndarray, luck: Luck) -> None:
        """Ask for clocks; all arguments are, or can be broadcast to, [stages of the level, plans, samples].

        Args:
            due_s: when.
            target: positions of the clocks.
            wanted: where there is a request.
            luck: [stages of the level, samples, gpus], whether changes are slow: the same for all plans.
        """
        calls, size, shape = self._calls, self._calls._gpu.size, due_s.shape
        target, wanted = np.broadcast_to(target, shape).ravel(), np.broadcast_to(wanted, shape).ravel()
        asked = calls._asked[self._gpu]
        at = np.flatnonzero(wanted & (target != asked))
        gpu, target, due = self._gpu[at], target[at], due_s.ravel()[at]
        calls._asked[gpu] = target
        # Where a call waits for the one before it, it is made with the new target.
        waits = (calls._called_s[gpu] > due) & (calls._tail[gpu] > calls._head[gpu])
        for step in range(1, calls.steps + 1):
            last = np.maximum(calls._tail[gpu[waits]] - step, calls._head[gpu[waits]])
            calls._target[last * size + gpu[waits]] = target[waits]
        new = ~waits
        at, gpu, target, due = at[new], gpu[new], target[new], due[new]
        start_s = np.maximum(due, calls._free_s[gpu])
        rises = target > asked[at]
        takes = luck.takes(at // (shape[1] * shape[2]) * shape[2] + at % shape[2], target)
        calls._called_s[gpu], calls._free_s[gpu] = start_s, start_s + takes.calls_s
        first_s = self._come(gpu, target, start_s, rises, takes)
        self.next_s[at] = np.minimum(self.next_s[at], first_s)
        calls.made += np.bincount(at % calls.made.size, minlength=calls.made.size).reshape(calls.made.shape)

    def _come(self, gpu: Index, target: Index, start_s: Floats, rises: np.ndarray, takes: Takes) -> Floats:
        """Let changes come into effect in their steps; return when each has its first."""
        calls = self._calls
        speed_s = start_s + np.where(rises, takes.last_s, takes.first_s)
        if calls.steps == 1:
            return self._step(gpu, target, speed_s, _BOTH)
        power_s = start_s + takes.one_s
        first_s = self._step(gpu, target, np.minimum(speed_s, power_s), np.where(rises, _POWER, _SPEED))
        self._step(gpu, target, np.maximum(speed_s, power_s), np.where(rises, _SPEED, _POWER))
        return first_s

    def _step(self, gpu: Index, target: Index, effect_s: Floats, part: Index | int) -> Floats:
        """Add a step behind those that are on their way; return when it comes into effect."""
        calls = self._calls
        in_order_s: Floats = np.maximum(effect_s, calls._last_s[gpu])
        place = calls._tail[gpu] * calls._gpu.size + gpu
        calls._effect_s[place], calls._target[place], calls._part[place] = in_order_s, target, part
        calls._last_s[gpu] = in_order_s
        calls._tail[gpu] += 1
        return in_order_s

    def take_effect(self, at: Index) -> None:
        """Bring the next change of some GPUs into effect; ``at`` are their places in ``clock``."""
        calls, gpu = self._calls, self._gpu[at]
        place = calls._head[gpu] * calls._gpu.size + gpu
        target = calls._target[place]
        if calls.steps == 1:
            self.clock[at] = self.power[at] = target
        else:
            part = calls._part[place]
            self.clock[at] = np.where(part == _POWER, self.clock[at], target)
            self.power[at] = np.where(part == _SPEED, self.power[at], target)
        self.next_s[at] = calls._effect_s[place + calls._gpu.size]
        calls._head[gpu] += 1

    def keep(self) -> None:
        """Store what has come into effect."""
        calls, gpu = self._calls, self._gpu
        calls._clock[gpu], calls._power[gpu], calls._next_s[gpu] = self.clock, self.power, self.next_s

"""The calls to the driver, and the clocks that are in effect because of them, for all stages, plans and samples.

Calls of a GPU follow each other. A call that has to wait is made with the newest target, as agents do, so at most one
waits. Changes come into effect in the order of their calls, however long each takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index


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

    def __init__(self, start: Start, samples: int, call_s: float) -> None:
        """Begin a run.

        Args:
            start: the clocks in effect, and on their way.
            samples: number of samples.
            call_s: how long a call keeps the next one waiting, seconds.
        """
        stages, plans = start.clock.shape
        self._shape, self._call_s = (stages, plans, samples), call_s
        coming = np.isfinite(start.effect_s).sum(axis=0)
        newest = np.take_along_axis(np.concatenate([start.clock[None], start.target]), coming[None], axis=0)[0]
        never = np.full((1, stages, plans), -np.inf)
        last_s = np.take_along_axis(np.concatenate([never, start.effect_s]), coming[None], axis=0)[0]
        self._clock, self._asked, self._tail, self._last_s = (
            np.repeat(values.ravel(), samples) for values in (start.clock, newest, coming, last_s)
        )
        self._head = np.zeros_like(self._tail)
        self._called_s = np.full(self._tail.shape, -np.inf)
        self._gpu = np.arange(self._tail.size)
        room = np.concatenate([start.effect_s, -never]), np.concatenate([start.target, start.clock[None]])
        self._effect_s, self._target = (np.repeat(values.ravel(), samples) for values in room)
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
        effect_s = np.full((pending + capacity + 1, size), np.inf)
        target = np.zeros((pending + capacity + 1, size), dtype=np.intp)
        for k in range(pending):
            at = np.minimum(self._head + k, self._tail) * size + self._gpu  # the place behind the last is empty
            effect_s[k], target[k] = self._effect_s[at] - elapsed, self._target[at]
        self._tail -= self._head
        self._head[:] = 0
        self._called_s -= elapsed
        self._last_s -= elapsed
        self._effect_s, self._target, self._next_s = effect_s.ravel(), target.ravel(), effect_s[0].copy()
        self.made = np.zeros(self._shape[1:])

    def of(self, stages: Index) -> StageCalls:
        """Return the calls of some stages, no stage twice."""
        return StageCalls(self, stages)


class StageCalls:
    """The calls of the stages of one level; arrays are [stages of the level × plans × samples], in that order.

    Attributes:
        clock: positions of the clocks in effect.
        next_s: when the next change comes into effect; infinite where none is on its way.
    """

    def __init__(self, calls: Calls, stages: Index) -> None:
        self._calls = calls
        self._gpu = calls._gpu.reshape(calls._shape)[stages].ravel()
        self.clock, self.next_s = calls._clock[self._gpu], calls._next_s[self._gpu]

    def ask(self, due_s: Floats, target: Index, wanted: np.ndarray, raise_s: Floats, lower_s: Floats) -> None:
        """Ask for clocks; all arguments are, or can be broadcast to, [stages of the level, plans, samples].

        Args:
            due_s: when.
            target: positions of the clocks.
            wanted: where there is a request.
            raise_s, lower_s: from the begin of a call to its effect, for a higher and for a lower clock.
        """
        calls, size, shape = self._calls, self._calls._gpu.size, due_s.shape
        target, wanted = np.broadcast_to(target, shape).ravel(), np.broadcast_to(wanted, shape).ravel()
        asked = calls._asked[self._gpu]
        at = np.flatnonzero(wanted & (target != asked))
        gpu, target, due = self._gpu[at], target[at], due_s.ravel()[at]
        calls._asked[gpu] = target
        # Where a call waits for the one before it, it is made with the new target.
        waits = (calls._called_s[gpu] > due) & (calls._tail[gpu] > calls._head[gpu])
        calls._target[(calls._tail[gpu[waits]] - 1) * size + gpu[waits]] = target[waits]
        new = ~waits
        at, gpu, target, due = at[new], gpu[new], target[new], due[new]
        start_s = np.maximum(due, calls._called_s[gpu] + calls._call_s)
        rises = target > asked[at]
        # Latencies are the same for all plans: row and sample tell them.
        draw = at // (shape[1] * shape[2]) * shape[2] + at % shape[2]
        latency_s = np.where(rises, raise_s.ravel()[draw], lower_s.ravel()[draw])
        effect_s = np.maximum(start_s + latency_s, calls._last_s[gpu])
        place = calls._tail[gpu] * size + gpu
        calls._effect_s[place], calls._target[place] = effect_s, target
        calls._called_s[gpu], calls._last_s[gpu] = start_s, effect_s
        calls._tail[gpu] += 1
        self.next_s[at] = np.minimum(self.next_s[at], effect_s)
        calls.made += np.bincount(at % calls.made.size, minlength=calls.made.size).reshape(calls.made.shape)

    def take_effect(self, at: Index) -> None:
        """Bring the next change of some GPUs into effect; ``at`` are their places in ``clock``."""
        calls, gpu = self._calls, self._gpu[at]
        place = calls._head[gpu] * calls._gpu.size + gpu
        self.clock[at] = calls._target[place]
        self.next_s[at] = calls._effect_s[place + calls._gpu.size]
        calls._head[gpu] += 1

    def keep(self) -> None:
        """Store what has come into effect."""
        self._calls._clock[self._gpu], self._calls._next_s[self._gpu] = self.clock, self.next_s

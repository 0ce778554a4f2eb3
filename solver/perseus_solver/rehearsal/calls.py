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
    """The state of every GPU's clock; arrays are [stages, plans, samples].

    Attributes:
        clock: positions of the clocks in effect.
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
        self.clock, self._asked, self._tail, self._last_s = (
            np.repeat(values[:, :, None], samples, axis=2) for values in (start.clock, newest, coming, last_s)
        )
        self._head = np.zeros_like(self._tail)
        self._called_s = np.full(self._shape, -np.inf)
        self._at = np.arange(self.clock.size).reshape(self._shape)
        room = np.concatenate([start.effect_s, -never]), np.concatenate([start.target, start.clock[None]])
        self._effect_s, self._target = (np.repeat(values[..., None], samples, axis=3).ravel() for values in room)
        self.made = np.zeros(self._shape[1:])

    def renew(self, capacity: int, elapsed_s: Floats) -> None:
        """Begin an iteration: count times from its begin, and make room for its calls.

        Args:
            capacity: largest number of calls that a stage may make in it.
            elapsed_s: float[plans, samples], duration of the iteration before.
        """
        size = self.clock.size
        pending = int((self._tail - self._head).max(initial=0))
        effect_s = np.full((pending + capacity + 1, size), np.inf)
        target = np.zeros((pending + capacity + 1, size), dtype=np.intp)
        for k in range(pending):
            at = np.minimum(self._head + k, self._tail)  # the place behind the last is empty
            effect_s[k] = (self._effect_s[at * size + self._at] - elapsed_s).ravel()
            target[k] = self._target[at * size + self._at].ravel()
        self._tail -= self._head
        self._head[:] = 0
        self._called_s -= elapsed_s
        self._last_s -= elapsed_s
        self._effect_s, self._target = effect_s.ravel(), target.ravel()
        self.made = np.zeros(self._shape[1:])

    def of(self, stages: Index) -> StageCalls:
        """Return the calls of some stages, no stage twice."""
        return StageCalls(self, stages)


class StageCalls:
    """The calls of the stages of one level; arrays are [stages of the level, plans, samples].

    Attributes:
        clock: positions of the clocks in effect.
        next_s: when the next change comes into effect; infinite where none is on its way.
    """

    def __init__(self, calls: Calls, stages: Index) -> None:
        self._calls, self._stages = calls, stages
        self._at = calls._at[stages]
        self.clock = calls.clock[stages]
        self._head = calls._head[stages]
        self.next_s = calls._effect_s[self._head * calls.clock.size + self._at]

    def ask(self, due_s: Floats, target: Index, wanted: np.ndarray, raise_s: Floats, lower_s: Floats) -> None:
        """Ask for clocks.

        Args:
            due_s: when.
            target: positions of the clocks.
            wanted: where there is a request.
            raise_s, lower_s: from the begin of a call to its effect, for a higher and for a lower clock.
        """
        calls, stages, size = self._calls, self._stages, self._calls.clock.size
        called_s, asked, tail = calls._called_s[stages], calls._asked[stages], calls._tail[stages]
        wanted = wanted & (target != asked)
        waits = wanted & (called_s > due_s) & (tail > self._head)
        calls._target[((tail - 1) * size + self._at)[waits]] = np.broadcast_to(target, waits.shape)[waits]
        new = wanted & ~waits
        start_s = np.maximum(due_s, called_s + calls._call_s)
        last_s = calls._last_s[stages]
        effect_s = np.maximum(start_s + np.where(target > asked, raise_s, lower_s), last_s)
        place = (tail * size + self._at)[new]
        calls._effect_s[place] = effect_s[new]
        calls._target[place] = np.broadcast_to(target, new.shape)[new]
        calls._called_s[stages] = np.where(new, start_s, called_s)
        calls._last_s[stages] = np.where(new, effect_s, last_s)
        calls._asked[stages] = np.where(wanted, target, asked)
        calls._tail[stages] = tail + new
        calls.made += new.sum(axis=0)
        self.next_s = calls._effect_s[self._head * size + self._at]

    def take_effect(self, hit: np.ndarray) -> None:
        """Bring the next change of some GPUs into effect."""
        calls, size = self._calls, self._calls.clock.size
        self.clock = np.where(hit, calls._target[self._head * size + self._at], self.clock)
        self._head = self._head + hit
        self.next_s = calls._effect_s[self._head * size + self._at]

    def keep(self) -> None:
        """Store what has come into effect."""
        self._calls.clock[self._stages] = self.clock
        self._calls._head[self._stages] = self._head

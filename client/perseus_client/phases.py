"""Iterations of several phases, such as the rollout, the reward and the training of reinforcement learning, or a
training and an evaluation that always follows. Each phase can have a clock of its own.

>>> import perseus_client
>>> phase = perseus_client.Phases("rollout", "training")
>>> for prompts in ["first", "second"]:
...     with phase("rollout"):
...         pass  # generate
...     with phase("training"):
...         pass  # forward, backward, optimizer

``perseus_client.trl`` does so for TRL's trainers.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from perseus_client.framework import Attachment, RankWork
from perseus_client.launchers import global_rank
from perseus_core.rank import RankId

log = logging.getLogger("perseus_client")


class Phases(Attachment):
    """The phases of this process's iterations. No method raises; without an agent none does anything.

    An iteration runs from the begin of the first phase to the end of the last one. All ranks run the same phases in the
    same order. One that runs others, or skips one, is dropped by the agent and goes on at default clocks.
    """

    def __init__(self, *names: str, framework: str = "phases", rank: int | None = None, **options: Any) -> None:
        """Name the phases of an iteration; nothing connects before the first one begins.

        Args:
            names: in the order in which they run; a plan and a profile number them from 0, as chunks.
            framework: for messages.
            rank: as in ``perseus_client.steps``.
            options: keyword arguments of ``perseus_client.connect``, such as ``timing``.
        """
        super().__init__(framework, options)
        self._rank = rank
        self._numbers = {name: number for number, name in enumerate(names)}
        self._open = False
        self._refused = False
        if not names or len(self._numbers) < len(names):
            self._say_refused(f"phases must have different names, and be at least one: {', '.join(names) or 'none'}")

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Mark a block as one phase."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        """A phase begins; one that is still open ends."""
        number = self._number(name)
        if number is None:
            return
        self._end_open()
        if number == 0:
            self.session.step_end()  # of an iteration whose last phase never ran
            self.follow(tuple(self._numbers), self._describe)
        self.session.instruction_begin("step", 0, number)
        self._open = True

    def end(self, name: str) -> None:
        """A phase ends, and with the last one the iteration."""
        number = self._number(name)
        self._end_open()
        if number == len(self._numbers) - 1:
            self.session.step_end()

    def _end_open(self) -> None:
        if self._open:
            self._open = False
            self.session.instruction_end()

    def _number(self, name: str) -> int | None:
        if self._refused:
            return None
        number = self._numbers.get(name)
        if number is None:
            self._say_refused(f"{name!r} is not among the phases {', '.join(self._numbers)}")
        return number

    def _say_refused(self, reason: str) -> None:
        self._refused = True
        log.error("perseus_client: phases: this rank trains without energy plans: %s", reason)
        self.detach()

    def _describe(self) -> RankWork:
        rank = global_rank(os.environ) if self._rank is None else self._rank
        return RankWork(RankId(rank, 0), [("step", 0, number) for number in self._numbers.values()])

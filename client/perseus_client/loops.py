"""Training loops without pipeline stages: each rank of a data-parallel or sharded job runs whole iterations.

A PerseusJob with schedule ``Steps`` plans them. One line marks the iterations of any loop:

>>> import perseus_client
>>> for batch in perseus_client.steps([1, 2, 3]):
...     pass  # forward, backward, optimizer

``perseus_client.hugging_face`` and ``perseus_client.lightning`` do so for trainers that run the loop themselves.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from perseus_client.framework import Attachment, RankWork, Schedule, agent_expected
from perseus_client.launchers import global_rank
from perseus_client.own_time import waits_inside, watch
from perseus_core.rank import RankId

log = logging.getLogger("perseus_client")
Item = TypeVar("Item")
_SCHEDULE: Final = (("step", 0, 0),)
_MOST_UNSEEN: Final = 3
"""Iterations without a backward pass through the watched model: one may have been skipped on purpose."""
_made: dict[str, Steps] = {}
"""By their arguments: of this process."""


class Steps(Attachment):
    """The iterations of this process. No method raises; without an agent none does anything.

    It connects when the first iteration begins: by then training code has usually chosen its GPU and wrapped its model.

    Attributes:
        is_last: the backward pass that comes next is the last of its iteration.
    """

    def __init__(self, framework: str, options: dict[str, Any], rank: int | None = None) -> None:
        """Create it for a framework; see ``steps`` for the other arguments."""
        super().__init__(framework, dict(options))
        self.is_last = True
        self._rank = rank
        self._own_time = False
        self._computing = False
        self._unseen = 0
        self._watched: Callable[[], Any] = lambda: None

    def watch(self, model: Any, call: Callable[[], None] | None) -> None:
        """Separate computing from waiting for others: what a rank computes ends with the last backward pass.

        Args:
            model: a torch module as it is trained, wrapped; a model that is watched already changes nothing.
            call: what to call at the end of each backward pass, such as ``backward_ended``; None: the caller does so.
        """
        if model is self._watched():
            return
        try:
            self._watched = weakref.ref(model)  # a model must not live on for this
            inside = waits_inside(model)
            if inside:
                log.info("perseus_client: ranks that are faster than others are not known: %s", inside)
            elif call is not None:
                self.on_detach(watch(model, call))
            self._own_time = not inside
        except Exception:  # nothing may reach the training code
            log.exception("perseus_client: backward passes are not watched")

    def begin(self) -> None:
        """An iteration begins."""
        self.follow((_SCHEDULE, self._own_time), self._describe)
        self.session.instruction_begin(*_SCHEDULE[0])
        self._computing = True

    def backward_ended(self) -> None:
        """A backward pass has computed its last gradient; if it is the iteration's last, others are waited for next."""
        if self.is_last and self._computing and self._own_time:
            self._computing, self._unseen = False, 0
            self.session.instruction_end()

    def end(self) -> None:
        """The iteration that began last ends, after its optimizer."""
        if self._computing:
            self._computing = False
            self.session.instruction_end()
            self._count_unseen()
        self.session.step_end()

    def _count_unseen(self) -> None:
        """Give up after some iterations in which no backward pass was seen: their steps hold the wait."""
        self._unseen += self._own_time
        if self._unseen >= _MOST_UNSEEN:
            self._own_time, self._unseen = False, 0
            log.warning(
                "perseus_client: no backward pass of the model was seen in %d iterations: ranks that are faster than "
                "others are not known. Pass the model that the loop calls",
                _MOST_UNSEEN,
            )

    def connect(self, rank: RankId, schedule: Schedule, joined: Sequence[int] = ()) -> None:
        """Connect with this schedule; the session before it is closed."""
        self._options.pop("own_time", None)
        self._options |= {"own_time": True} if self._own_time else {}
        super().connect(rank, schedule, joined)

    def _describe(self) -> RankWork:
        return RankWork(RankId(global_rank(os.environ) if self._rank is None else self._rank, 0), list(_SCHEDULE))


def steps(
    loop: Iterable[Item], *, model: Any = None, accumulate: int = 1, rank: int | None = None, **options: Any
) -> Iterator[Item]:
    """Return the items of a training loop one by one, and mark its iterations.

    Call it for every epoch: the process stays connected between them, and iterations are counted on. Every rank must
    make the same number of iterations.

    Args:
        loop: what the loop runs over, usually batches.
        model: the torch module that the loop calls, wrapped: then what a rank computes is known apart from its wait for
            others, so that slow ranks are found and fast ones save. None: each step is one whole.
        accumulate: items of one iteration, where gradients are accumulated. What is left over at the end of a loop is
            an incomplete iteration, which is not used.
        rank: which of the data-parallel ranks this is; None: torch's global rank, or the one that the launcher (such
            as torchrun, MPI or srun) names. Where it is not known, there are no energy plans.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.
    """
    if accumulate < 1:
        log.error("perseus_client: steps: accumulate must be 1 or more, is %s: no energy plans", accumulate)
        yield from loop
        return
    marks = _made.setdefault(repr((rank, sorted(options.items()))), Steps("steps", options, rank))
    if model is not None and agent_expected(options):
        marks.watch(model, marks.backward_ended)
    for number, item in enumerate(loop):
        if number % accumulate == 0:
            marks.begin()
        marks.is_last = (number + 1) % accumulate == 0
        yield item
        if marks.is_last:
            marks.end()

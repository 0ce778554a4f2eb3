"""Training loops without pipeline stages: each rank of a data-parallel or sharded job runs whole iterations.

A PerseusJob with schedule ``Steps`` plans them. One line marks the iterations of any loop:

>>> import perseus_client
>>> for batch in perseus_client.steps([1, 2, 3]):
...     pass  # forward, backward, optimizer

``perseus_client.hugging_face`` and ``perseus_client.lightning`` do so for trainers that run the loop themselves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

from perseus_client.framework import Attachment, Schedule
from perseus_proto.rank import RankId

log = logging.getLogger("perseus_client")
Item = TypeVar("Item")
_SCHEDULE: Final = (("step", 0, 0),)
_made: dict[str, Steps] = {}
"""By their arguments: of this process."""


class Steps(Attachment):
    """The iterations of this process. No method raises; without an agent none does anything.

    It connects when the first iteration begins: by then training code has usually chosen its GPU.
    """

    def __init__(self, framework: str, options: dict[str, Any], rank: int | None = None) -> None:
        """Create it for a framework; see ``steps`` for the other arguments."""
        super().__init__(framework, options)
        self._rank = rank

    def begin(self) -> None:
        """An iteration begins."""
        self.follow(_SCHEDULE, self._describe)
        self.session.instruction_begin(*_SCHEDULE[0])

    def end(self) -> None:
        """The iteration that began last ends, after its optimizer."""
        self.session.instruction_end()
        self.session.step_end()

    def _describe(self) -> tuple[RankId, Schedule]:
        return RankId(_rank() if self._rank is None else self._rank, 0), list(_SCHEDULE)


def steps(loop: Iterable[Item], *, accumulate: int = 1, rank: int | None = None, **options: Any) -> Iterator[Item]:
    """Return the items of a training loop one by one, and mark its iterations.

    Call it for every epoch: the process stays connected between them, and iterations are counted on. Every rank must
    make the same number of iterations.

    Args:
        loop: what the loop runs over, usually batches.
        accumulate: items of one iteration, where gradients are accumulated. What is left over at the end of a loop is
            an incomplete iteration, which is not used.
        rank: which of the data-parallel ranks this is; None: torch's global rank, or the environment's RANK.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.
    """
    if accumulate < 1:
        log.error("perseus_client: steps: accumulate must be 1 or more, is %s: no energy plans", accumulate)
        yield from loop
        return
    marks = _made.setdefault(repr((rank, sorted(options.items()))), Steps("steps", options, rank))
    for number, item in enumerate(loop):
        if number % accumulate == 0:
            marks.begin()
        yield item
        if (number + 1) % accumulate == 0:
            marks.end()


def _rank() -> int:
    with contextlib.suppress(Exception):  # nothing may reach the training code
        distributed = sys.modules["torch"].distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    with contextlib.suppress(ValueError):
        return int(os.environ.get("RANK", "0"))
    return 0

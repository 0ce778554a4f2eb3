"""One agent per node: a lock beside the journal.

The agent takes it and gives its keeper the descriptor, so the lock is free only when the agent has ended and its keeper
has given back what it left locked: a successor never meets a GPU that is about to be reset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from perseus_agent.clocks.journal import JournalLock
from perseus_agent.errors import SettingsError

log = logging.getLogger(__name__)

PREDECESSOR_WAIT_S: Final = 60.0
"""How long to wait for an agent that is still stopping on this node: longer than its drain and a keeper's patience."""
_RETRY_S: Final = 0.1


@contextmanager
def only_agent(journal: Path, stopped_within: Callable[[float], bool]) -> Iterator[int | None]:
    """Hold the lock; yields its descriptor.

    Args:
        journal: the agent's journal.
        stopped_within: waits for so many seconds, or until the agent shall stop; whether it shall.

    Yields:
        The descriptor that holds the lock; None: the agent shall stop.

    Raises:
        SettingsError: another agent does not go away, or the lock cannot be made.
    """
    lock = JournalLock(journal)
    try:
        for attempt in range(int(PREDECESSOR_WAIT_S / _RETRY_S)):
            if lock.take():
                yield lock.descriptor
                return
            if attempt == 0:
                log.warning("another agent, or its keeper, holds %s: waiting for it to go", lock.path)
            if stopped_within(_RETRY_S):
                yield None
                return
        raise SettingsError(f"--journal: another agent holds {lock.path}; only one may write the clocks of a node")
    finally:
        lock.release()

"""The agent's side of the keeper: it shows its ledger to whatever keeper listens, for as long as the agent runs.

A connection carries one message, from the agent: the descriptors of the ledger and of the lock that makes it the only
agent of the node. Everything after that goes through the ledger. The agent notices the keeper's end by the hang-up, and
a keeper that hangs by its silence in the ledger; it goes on driving, looks for the next keeper, and says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from typing import Final

from perseus_agent.keeper.ledger import UNWATCHED_S, Ledger
from perseus_agent.pods.identity import peer_credentials

log = logging.getLogger(__name__)

LOOK_S: Final = 0.1
REPORT_S: Final = 0.5
"""How often it is looked whether a keeper that is connected still watches, which is only logged here."""
_WATCHED: Final = "a clock keeper watches"
_GONE: Final = f"the clock keeper has gone: GPUs stay as they are for {UNWATCHED_S:g} s, and no other is locked"
_EXPIRED: Final = f"no clock keeper for {UNWATCHED_S:g} s: GPUs are at their default clocks until one watches"
_LEVELS: Final = {_WATCHED: logging.INFO, _GONE: logging.WARNING, _EXPIRED: logging.ERROR}


class KeeperLink:
    """A thread that finds keepers."""

    def __init__(self, path: str, ledger: Ledger, lock: int) -> None:
        """A link that has not begun.

        Args:
            path: of the keeper's socket.
            ledger: of this agent.
            lock: the descriptor that makes it the only agent; it stays the caller's.
        """
        self._path = path
        self._ledger = ledger
        self._lock = lock
        self._reported = _GONE  # at first nothing is locked, and a keeper is about to start

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="keeper-link", daemon=True).start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError), open_socket() as connection:
                connection.connect(self._path)
                check_user(connection)
                socket.send_fds(connection, [b"\0"], [self._ledger.descriptor, self._lock])
                hung_up = select.poll()
                hung_up.register(connection, select.POLLIN)  # a keeper sends nothing
                while not hung_up.poll(1000 * REPORT_S):
                    self._report()
                self._ledger.watched_for(0.0)
            self._report()
            time.sleep(LOOK_S)

    def _report(self) -> None:
        """Log what has changed."""
        ledger, before = self._ledger, self._reported
        self._reported = _WATCHED if ledger.watched else _EXPIRED if ledger.watch_expired else _GONE
        if self._reported != before:
            log.log(_LEVELS[self._reported], "%s", self._reported)


def open_socket() -> socket.socket:
    """A socket of the kind on which agent and keeper meet."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_user(connection: socket.socket) -> int:
    """The process at the other end.

    Raises:
        PermissionError: it runs as another user.
    """
    pid, user_id = peer_credentials(connection)
    if user_id != os.geteuid():
        raise PermissionError(f"process {pid} runs as user {user_id}, this one as {os.geteuid()}")
    return pid

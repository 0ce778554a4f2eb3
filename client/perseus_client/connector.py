"""The background thread that connects to the agent and notices when the agent goes away. Only this thread may wait.

It passes a connection on by setting one attribute, ``writer``, which the program's thread reads when a step begins.
Whether the agent is absent, slow, refusing, dead or restarted makes no difference: the thread tries again, with pauses
that grow to ``SLOWEST_RETRY_S``.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

from perseus_proto.frames import ChannelError
from perseus_proto.hello import Refusal, Welcome, receive_answer

log = logging.getLogger("perseus_client")

FIRST_RETRY_S: Final = 0.1
SLOWEST_RETRY_S: Final = 30.0
ANSWER_S: Final = 10.0
"""How long the agent may take to accept, and to answer: it may have to ask the kubelet which pod this process belongs
to.
"""
BEAT_S: Final = 0.05
"""How often a process says that it lives, where it does."""
_ANSWER: Final = struct.pack("ll", int(ANSWER_S), 0)
"""The same in seconds and microseconds, as the kernel reads them."""


W = TypeVar("W")


@dataclass(frozen=True)
class Introduction(Generic[W]):
    """What a process tells the agent, and what it does with the answer.

    Attributes:
        hello: the whole frame.
        who: for the log, "dp 0, stage 1, tp 0".
        kind: for the log, "rank".
        open: makes a writer of a welcome, on the connecting thread, before the first step uses it.
        beat: called with the writer every ``BEAT_S``, on the same thread; None: nothing is.
    """

    hello: bytes
    who: str
    kind: str
    open: Callable[[Welcome], W]
    beat: Callable[[W], None] | None = None


class Connector(Generic[W]):
    """One connection to the agent, opened again whenever it breaks."""

    _announced: ClassVar[bool] = False
    """This process has said that it is connected."""

    def __init__(self, path: str, introduction: Introduction[W]) -> None:
        self.writer: W | None = None
        """What the next step writes to; None while there is no agent."""
        self._path = path
        self._introduction = introduction
        self._connection: socket.socket | None = None
        self._stopped = threading.Event()
        self._connected = threading.Event()
        self._logged: str | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="perseus-client", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has accepted this process; False after the timeout."""
        return self._connected.wait(timeout_s)

    def stop(self) -> None:
        """Close the connection for good."""
        self._stopped.set()
        self.writer = None
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it

    def abandon(self) -> None:
        """In a forked child, which has no such thread: release what is the parent's without a message to the agent."""
        self.writer = None
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopped.is_set():
            try:
                if self._serve():
                    retry_s = FIRST_RETRY_S
            except (OSError, ChannelError) as error:
                self._log_change(f"no agent at {self._path}: {error}")
            except Exception:
                log.exception("perseus_client: stopped looking for the agent after an unexpected error")
                return
            finally:
                self.writer = None
                self._connected.clear()
            # Jitter: the ranks of a node must not all reconnect to a restarted agent in the same millisecond.
            self._stopped.wait(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            retry_s = min(2 * retry_s, SLOWEST_RETRY_S)

    def _serve(self) -> bool:
        """Serve one connection until it closes; True if the agent accepted this process."""
        introduction = self._introduction
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            self._connection = connection
            try:
                # A connection that may not block is refused while others wait; one that blocks takes its turn.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _ANSWER)
                connection.connect(self._path)
                connection.settimeout(ANSWER_S)
                # A refused hello need not be read: the agent may have answered and closed the connection already.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(introduction.hello)
                answer = receive_answer(connection, ANSWER_S)
                if isinstance(answer, Refusal):
                    self._log_change(
                        f"the agent refuses this {introduction.kind} ({answer.reason.name}): {answer.message}"
                    )
                    return False
                writer = introduction.open(answer)
                connection.settimeout(BEAT_S if introduction.beat is not None else None)
                if self._stopped.is_set():
                    return True
                self.writer = writer
                del writer  # its eventfd is closed when the last mark that uses it is done
                self._logged = None
                self._connected.set()
                self._say_connected()
                while not self._ended(connection):  # until the agent goes away, or stop() does
                    self._beat()
                self._log_change(f"the agent has gone; this {introduction.kind} goes on without it")
                return True
            finally:
                self._connection = None

    def _beat(self) -> None:
        writer, beat = self.writer, self._introduction.beat
        if writer is not None and beat is not None:
            beat(writer)

    @staticmethod
    def _ended(connection: socket.socket) -> bool:
        """Wait for the end of a connection, on which nothing comes any more; False after a beat."""
        try:
            connection.recv(1)
        except TimeoutError:
            return False
        return True

    def _say_connected(self) -> None:
        """Log the first connection of the process where users see it even if they have not set up logging."""
        text = f"perseus_client: connected to the agent as {self._introduction.who}"
        if Connector._announced or log.hasHandlers() or logging.lastResort is None:
            log.info(text)
        else:  # the handler of last resort writes to stderr, and would drop what is less than a warning
            logging.lastResort.emit(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))
        Connector._announced = True

    def _log_change(self, message: str) -> None:
        """Log a warning when the message changes; repetitions are for debugging."""
        if not self._stopped.is_set():
            log.log(logging.DEBUG if message == self._logged else logging.WARNING, "perseus_client: %s", message)
            self._logged = message

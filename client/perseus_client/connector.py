"""The background thread that finds the agent, says hello, and notices when it goes: here alone the client may wait.

It hands over by setting one attribute, ``writer``, which the training thread looks at when a step begins. Agent
absent, slow, refusing, dead or restarted are all the same to it: try again, more and more seldom. Used by
``perseus_client.session`` alone.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from typing import Final

from perseus_proto.channel import ChannelWriter
from perseus_proto.hello import ChannelError, Refusal, receive_answer

log = logging.getLogger("perseus_client")

FIRST_RETRY_S: Final = 0.1
SLOWEST_RETRY_S: Final = 30.0
ANSWER_S: Final = 10.0
"""The agent may have to ask the kubelet who we are."""


class Connector:
    """One connection to the agent, made again whenever it breaks."""

    def __init__(self, path: str, hello: bytes, instructions: int) -> None:
        self.writer: ChannelWriter | None = None
        """What the next step writes to; None while no agent listens."""
        self._path = path
        self._hello = hello
        self._instructions = instructions
        self._connection: socket.socket | None = None
        self._stopped = threading.Event()
        self._connected = threading.Event()
        self._said: str | None = None

    def start(self) -> None:
        """Begin to look for the agent."""
        threading.Thread(target=self._run, name="perseus-client", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has answered."""
        return self._connected.wait(timeout_s)

    def stop(self) -> None:
        """Hang up for good."""
        self._stopped.set()
        self.writer = None
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it

    def abandon(self) -> None:
        """In a forked child, which has no such thread: let go of what is the parent's without telling the agent."""
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
                self._say(f"no agent at {self._path}: {error}")
            except Exception:
                log.exception("perseus_client: gave up looking for the agent")
                return
            finally:
                self.writer = None
                self._connected.clear()
            # Jitter: the ranks of a node must not all come back to a restarted agent in the same millisecond.
            self._stopped.wait(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            retry_s = min(2 * retry_s, SLOWEST_RETRY_S)

    def _serve(self) -> bool:
        """One connection from hello to hang-up; True if the agent took us."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            self._connection = connection
            try:
                connection.settimeout(ANSWER_S)
                connection.connect(self._path)
                # Who is refused for what it is need not be heard: the agent may have answered and hung up already.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(self._hello)
                answer = receive_answer(connection, ANSWER_S)
                if isinstance(answer, Refusal):
                    self._say(f"the agent refuses this rank ({answer.reason.name}): {answer.message}")
                    return False
                writer = ChannelWriter(answer.memory_fd, answer.event_fd, self._instructions)
                connection.settimeout(None)
                if self._stopped.is_set():
                    return True
                self.writer = writer
                del writer  # the bell is closed when the last mark that uses it is done
                self._said = None
                self._connected.set()
                log.info("perseus_client: connected to the agent at %s", self._path)
                connection.recv(1)  # until the agent goes away, or stop() does
                self._say("the agent has gone; training goes on without it")
                return True
            finally:
                self._connection = None

    def _say(self, message: str) -> None:
        """Once for each change; the rest is for debugging."""
        if not self._stopped.is_set():
            log.log(logging.DEBUG if message == self._said else logging.WARNING, "perseus_client: %s", message)
            self._said = message

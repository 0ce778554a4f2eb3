"""An agent for the client's tests: a thread that speaks the protocol and keeps what it learns."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from perseus_client.session import Session
from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader, IterationRecord
from perseus_proto.hello import Hello

MICROBATCHES = 4
SCHEDULE: list[tuple[str | int, int, int]] = [
    (kind, microbatch, 0) for kind in ("forward", "backward") for microbatch in range(MICROBATCHES)
]


class Agent:
    """Accepts ranks for as long as it lives. ``answer`` replaces what it does with a hello."""

    def __init__(self, path: Path, answer: Callable[[socket.socket, Hello], None] | None = None) -> None:
        self.readers: list[ChannelReader] = []
        self.hellos: list[Hello] = []
        self.connections: list[socket.socket] = []
        self._answer = answer or self._welcome
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                with contextlib.suppress(OSError):
                    hello = wire.receive_hello(connection, 60)
                    self.hellos.append(hello)
                    self._answer(connection, hello)

    def _welcome(self, connection: socket.socket, hello: Hello) -> None:
        reader = ChannelReader.create(len(hello.schedule))
        self.readers.append(reader)  # before the rank may believe that it is followed
        wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)

    def die(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.close()
        self._thread.join()
        for connection in self.connections:  # one may have been accepted meanwhile
            connection.close()
        for reader in self.readers:
            reader.close()


def iterate(session: Session) -> None:
    with session.step():
        for kind, microbatch, chunk in SCHEDULE:
            with session.instruction(kind, microbatch, chunk):
                pass


def drained(reader: ChannelReader) -> IterationRecord:
    record = reader.drain_iteration()
    assert record is not None
    return record

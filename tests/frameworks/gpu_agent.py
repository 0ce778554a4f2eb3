"""The agent's end of one rank on a real GPU: it keeps the records, and when the GPU's own marks became visible."""

from __future__ import annotations

import select
import socket
import threading
import time
from pathlib import Path

from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader, IterationRecord

LOOK_S = 20e-6


class AgentEnd:
    """Takes one rank and keeps what it says."""

    def __init__(self, path: Path, *, watch: bool = False) -> None:
        """``watch``: look at the GPU's position all the time, on a processor of its own."""
        self.hello: wire.Hello | None = None
        self.records: list[IterationRecord] = []
        self.seen_us: dict[tuple[int, int], int] = {}
        """When a position of the GPU was first seen, by (iteration, boundary); some pass between two looks."""
        self.unordered = 0
        """How often the GPU was seen further back than before."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._gone = threading.Event()
        self._watch = watch
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def complete(self) -> dict[int, IterationRecord]:
        """The complete records, by iteration."""
        return {record.iteration: record for record in self.records if record.complete}

    def delays_us(self) -> list[int]:
        """From the moment at which the GPU passed a boundary, as its events say, to that at which its mark was seen."""
        found = []
        for iteration, record in self.complete().items():
            for index, (begin_us, duration_us) in enumerate(zip(record.begins_us, record.durations_us, strict=True)):
                for boundary, at_us in ((2 * index + 1, begin_us), (2 * index + 2, begin_us + duration_us)):
                    if (iteration, boundary) in self.seen_us:
                        found.append(self.seen_us[iteration, boundary] - at_us)
        return sorted(found)

    def _follow(self) -> None:
        with self._listener:
            connection, _ = self._listener.accept()
        with connection:
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        self.hello = wire.receive_hello(connection, 10)
        reader = ChannelReader.create(len(self.hello.schedule))
        wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)
        watcher = threading.Thread(target=self._look, args=(reader,), daemon=True)
        if self._watch:
            watcher.start()
        while not self._gone.is_set():
            if connection in select.select([connection, reader.event_fd], [], [])[0]:
                self._gone.set()
            reader.acknowledge()
            while (record := reader.drain_iteration()) is not None:
                self.records.append(record)
        if self._watch:
            watcher.join()

    def _look(self, reader: ChannelReader) -> None:
        last: tuple[int, int] | None = None
        while not self._gone.is_set():
            position = reader.gpu_position()
            if position is not None and position != last:
                self.seen_us[position] = time.monotonic_ns() // 1000
                self.unordered += last is not None and position < last
                last = position
            time.sleep(LOOK_S)

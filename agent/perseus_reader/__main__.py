"""``perseus-reader``: waits for the node's agent, and reads the pages that it names, each on a thread of its own.

Whatever happens to a page (it is slow, hostile, gone, of an unknown engine) concerns that page alone: its memory is not
written, and the agent returns its GPUs to their default clocks. If the agent goes, everything ends with the connection.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from perseus_proto import reader_link as link
from perseus_proto.engine_channel import EngineWriter
from perseus_proto.frames import ChannelError
from perseus_reader.pages import BadPage, read_page
from perseus_reader.reader import PageWriter
from perseus_reader.source import PageSource
from perseus_runtime.logs import log_to_stderr

log = logging.getLogger("perseus_reader")

INTERVAL_S: Final = 0.25
"""A page of vLLM costs its API process 20 to 40 ms: four a second are a tenth of one core of it."""
MOST_PAGES: Final = 64
"""A node has 8 or 16 GPUs, and an engine at least one of them."""
_AGAIN_S: Final = 1.0
"""After a page that could not be read."""


class _Page:
    """One page, read on a thread until it is stopped."""

    def __init__(self, order: link.ReadPage, writer: EngineWriter, say: Callable[[link.PageFound], None]) -> None:
        self._order, self._say = order, say
        self._source = PageSource(order.host, order.port, order.path)
        self._writer = PageWriter(writer)
        self._stopped = threading.Event()
        self._said = link.PageFound(order.key, fault="not read yet")
        threading.Thread(target=self._run, name=f"page-{order.key}", daemon=True).start()

    def stop(self) -> None:
        """Read it no more; a fetch that is under way ends by its own bound of time."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            try:
                page = read_page(self._source.fetch())
                self._writer.write(page)
                answer, pause_s = link.PageFound(self._order.key, page.engine, page.model, role=page.role), INTERVAL_S
            except BadPage as error:
                answer, pause_s = link.PageFound(self._order.key, fault=_printable(str(error))), _AGAIN_S
            if answer != self._said:
                self._said = answer
                log.info("page %d: %s", answer.key, answer.fault or f"{answer.engine} with {answer.model}")
                with contextlib.suppress(OSError):
                    self._say(answer)
        self._source.close()


class PageReader:
    """Serves one agent, for as long as it is connected."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pages: dict[int, _Page] = {}

    def serve(self) -> None:
        """Do what the agent asks, until it hangs up."""
        try:
            while True:
                packet, descriptors, _, _ = socket.recv_fds(self._connection, link.MAX_PACKET_BYTES + 1, 2)
                if not packet:
                    return
                try:
                    self._obey(link.decode(packet, link.ReadPage), descriptors)
                except (ChannelError, OSError) as error:
                    log.warning("an order of the agent was not understood: %s", error)
        finally:
            for page in self._pages.values():
                page.stop()

    def _obey(self, order: link.ReadPage, descriptors: list[int]) -> None:
        before = self._pages.pop(order.key, None)
        if before is not None:
            before.stop()
        refusal = ""
        if len(descriptors) != 2 or not order.host:
            refusal = "" if not order.host else "the order must carry the memory"
        elif not link.is_address(order.host):
            refusal = "host: must be an IP address"
        elif len(self._pages) >= MOST_PAGES:
            refusal = f"at most {MOST_PAGES} pages"
        if refusal or not order.host:
            for descriptor in descriptors:
                os.close(descriptor)
            if refusal:
                link.send(self._connection, link.PageFound(order.key, fault=refusal))
            return
        writer = EngineWriter(*descriptors)
        self._pages[order.key] = _Page(order, writer, lambda answer: link.send(self._connection, answer))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[: link.MAX_TEXT]


def _listen(listener: socket.socket, path: Path) -> None:
    unborn = path.with_suffix(".new")
    unborn.unlink(missing_ok=True)
    listener.bind(str(unborn))
    unborn.chmod(0o666)  # the agent may have no right to what is ours; its directory is for these two alone
    listener.listen(1)
    unborn.replace(path)  # where it is found it can be reached


def main() -> int:
    """Entry point. Ends with SIGTERM; with exit code 2 and one line where it cannot wait on the socket."""
    parser = argparse.ArgumentParser(prog="perseus-reader", description=__doc__.partition("\n")[0])
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket on which to wait for the agent")
    given = parser.parse_args()
    log_to_stderr("INFO")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with link.open_link() as listener:
        try:
            _listen(listener, given.socket)
        except OSError as error:
            log.error("--socket: cannot wait on %s: %s", given.socket, error.strerror or error)
            return 2
        while True:
            connection, _ = listener.accept()
            with connection:
                log.info("the agent is connected")
                with contextlib.suppress(OSError):
                    PageReader(connection).serve()
                log.info("the agent has gone")


if __name__ == "__main__":
    sys.exit(main())

"""Engines that do not say by themselves what they do: a process without privileges reads their metrics pages for us.

A page becomes a session like that of an engine with the plugin, of the pod that the operator has named; what the reader
writes into its memory is trusted as little as what an engine writes. No byte of a page is read here. The reader's end,
or its silence, ends the sessions; an engine that says by itself what it does takes its page's place.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from perseus_agent.errors import PeerRefused
from perseus_agent.node.processes import ServingSession, Session
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_agent.serving.law import LawSettings
from perseus_agent.serving.totals import EngineTotals
from perseus_core.serving import ROLE_FLAG, PageAddress
from perseus_proto import reader_link as link
from perseus_proto.engine_channel import EngineReader
from perseus_proto.engine_hello import EngineHello
from perseus_proto.frames import ChannelError

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
SEND_S: Final = 1.0
"""A reader that does not take an order for so long hangs: the link ends, so that it can hold up nothing, not even the
agent's own end."""
MAX_PAGES: Final = 64
REFUSED_S: Final = 10.0
"""After a pod whose GPUs may not be driven: its GPUs may be others by then."""
_UNKNOWN: Final = "unknown"
_NO_READER: Final = "nothing on this node reads metrics pages: see agent.reader of the chart"


class PageSession(ServingSession):
    """The engine whose page is read."""

    # A page is read four times a second and is late by up to two tenths: one that is missed is no silence yet, and the
    # clocks are back within the second.
    law = LawSettings(silence_s=0.9)
    by_page = True


class PageNode(Protocol):
    """What the node does with them."""

    page_faults: Mapping[str, str]
    engine_totals: EngineTotals

    def wanted_pages(self) -> Mapping[str, PageAddress]:
        """The pages of pods whose engine does not say by itself what it does, by the UID of the pod."""
        ...

    def admit(self, session: Session) -> None: ...
    def leave(self, session: Session) -> None: ...


@dataclass
class _Page:
    pod_uid: str
    address: PageAddress
    memory: EngineReader
    session: PageSession | None = None
    over: bool = False
    """Its session has ended, and with it the memory."""
    refused_s: float = 0.0
    """When its session was refused (monotonic); 0: it was not."""


class PageLink:
    """A thread that holds the connection to the reader."""

    def __init__(self, path: str, node: PageNode) -> None:
        """``path``: of the reader's socket; empty: there is no reader."""
        self._path = path
        self._node = node
        self._faults: dict[str, str] = {}
        self._pages: dict[int, _Page] = {}
        self._key = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pages", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End all sessions."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            wanted = self._node.wanted_pages()
            if not wanted:
                self._say_of_all({}, "")
                continue
            try:
                if not self._path:
                    raise FileNotFoundError
                with link.open_link() as connection:
                    connection.settimeout(SEND_S)
                    connection.connect(self._path)
                    self._say_of_all(wanted, "its page was not read yet")
                    self._serve(connection)
            except (OSError, ChannelError) as error:
                log.debug("no reader: %s", error)
            finally:
                self._end_all()
            self._say_of_all(wanted, _NO_READER)

    def _serve(self, connection: socket.socket) -> None:
        """Keep the pages that are wanted, until the reader hangs up or none is wanted."""
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        while not self._stopped.is_set():
            wanted = dict(list(self._node.wanted_pages().items())[:MAX_PAGES])
            if not wanted:
                return
            self._keep(connection, wanted)
            if readable.poll(1000 * LOOK_S):
                packet = connection.recv(link.MAX_PACKET_BYTES + 1)
                if not packet:
                    return
                self._found(link.decode(packet, link.PageFound))

    def _keep(self, connection: socket.socket, wanted: Mapping[str, PageAddress]) -> None:
        for key, page in list(self._pages.items()):
            if page.session is not None and page.session.dismissed and not page.refused_s:
                page.refused_s = time.monotonic()
                self._fault(page.pod_uid, "its GPUs may not be driven: see the agent's log")
            again = page.refused_s and time.monotonic() > page.refused_s + REFUSED_S
            if page.over or again or wanted.get(page.pod_uid) != page.address:
                link.send(connection, link.ReadPage(key))
                self._end(key)
        read_pods = {page.pod_uid for page in self._pages.values()}
        for pod_uid, address in wanted.items():
            if pod_uid not in read_pods:
                self._key += 1
                memory = EngineReader.create()
                self._pages[self._key] = _Page(pod_uid, address, memory)
                order = link.ReadPage(self._key, address.host, address.port, address.path)
                link.send(connection, order, (memory.memory_fd, memory.event_fd))
        self._node.engine_totals.pages_read = sum(page.session is not None for page in self._pages.values())
        self._faults = {pod_uid: why for pod_uid, why in self._faults.items() if pod_uid in wanted}
        self._node.page_faults = dict(self._faults)

    def _found(self, answer: link.PageFound) -> None:
        page = self._pages.get(answer.key)
        if page is None:
            return  # it was said of a page that is no longer wanted
        if answer.fault:
            log.warning("a page cannot be read: %s", answer.fault, extra={"pod": page.pod_uid})
            self._fault(page.pod_uid, answer.fault)
            if page.session is not None:  # its memory goes with it, and the page is asked for anew
                self._node.leave(page.session)
                page.session, page.over = None, True
            return
        if page.session is None and not page.over and not page.refused_s:
            self._admit(page, answer)

    def _admit(self, page: _Page, answer: link.PageFound) -> None:
        flags = ((ROLE_FLAG, answer.role),) if answer.role else ()
        hello = EngineHello(answer.engine, _UNKNOWN, answer.model or _UNKNOWN, "", flags)
        peer = Peer(0, 0, 0, PodProcess(page.pod_uid, None), None)
        session = PageSession(peer, hello, page.memory, lambda: None)
        try:
            self._node.admit(session)
        except PeerRefused as error:
            self._fault(page.pod_uid, str(error))
            page.refused_s = time.monotonic()
            return
        page.session = session
        self._fault(page.pod_uid, "")

    def _fault(self, pod_uid: str, why: str) -> None:
        """Say why a page is not read; empty: it is."""
        self._faults.pop(pod_uid, None)
        if why:
            self._faults[pod_uid] = why
        self._node.page_faults = dict(self._faults)

    def _say_of_all(self, pods: Iterable[str], why: str) -> None:
        self._faults = dict.fromkeys(pods, why)
        self._node.page_faults = dict(self._faults)

    def _end(self, key: int) -> None:
        page = self._pages.pop(key)
        if page.session is not None:
            self._node.leave(page.session)
        elif not page.over:  # the session frees its own, once no GPU's thread uses it any more
            page.memory.close()

    def _end_all(self) -> None:
        self._node.engine_totals.pages_read = 0
        for key in list(self._pages):
            with contextlib.suppress(OSError):
                self._end(key)

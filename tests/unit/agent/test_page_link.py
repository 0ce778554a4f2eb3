"""The agent's side of metrics pages: whose memory is freed, and when."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from perseus_agent.node.pages import PageLink
from perseus_agent.node.processes import Session
from perseus_agent.serving.totals import EngineTotals
from perseus_core.serving import ROLE_FLAG, PageAddress
from perseus_proto import reader_link as link
from perseus_proto.frames import ChannelError

PAGES = {"pod-0": PageAddress("10.0.0.1", 8000, "/metrics")}


class Node:
    """A node whose GPUs still use the memory of a session that has left."""

    def __init__(self) -> None:
        self.page_faults: dict[str, str] = {}
        self.engine_totals = EngineTotals()
        self.admitted: list[Session] = []
        self.left: list[Session] = []
        self.admit, self.leave = self.admitted.append, self.left.append

    def wanted_pages(self) -> dict[str, PageAddress]:
        return PAGES


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours


def test_a_page_that_goes_leaves_its_memory_to_the_session(connection: socket.socket) -> None:
    node = Node()
    pages = PageLink("", node)
    pages._keep(connection, PAGES)
    pages._found(link.PageFound(1, "vllm", "llama"))
    [session] = node.admitted
    pages._found(link.PageFound(1, fault="it is gone"))
    pages._keep(connection, PAGES)
    assert node.left == [session]
    assert session.channel.read() is not None, "a GPU's thread may still read it"
    session.channel.close()
    pages._keep(connection, {})


def test_what_a_page_says_of_its_role_is_a_flag_of_the_engine(connection: socket.socket) -> None:
    node = Node()
    pages = PageLink("", node)
    pages._keep(connection, PAGES)
    pages._found(link.PageFound(1, "sglang", "llama", role="decode"))
    [session] = node.admitted
    assert session.hello.flags == ((ROLE_FLAG, "decode"),)  # type: ignore[union-attr]
    with pytest.raises(ChannelError, match="role"):
        link.PageFound(1, "sglang", role="both")
    session.channel.close()

"""The reader as a process: it reads the page of a simulated engine, and whatever a stranger serves harms only that."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

from perseus_core.serving import place_of
from perseus_proto import reader_link as link
from perseus_proto.engine_channel import EngineReader, counted_between
from perseus_sim.processes import Child, Processes
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.metrics_server import Manner, MetricsServer
from perseus_sim.serving.recorded_pages import EngineKind

pytestmark = pytest.mark.processes


class Agent:
    """The agent's side of the link."""

    def __init__(self, path: Path) -> None:
        self._connection = link.open_link()
        self._connection.connect(str(path))
        self._connection.settimeout(20)
        self.memory: dict[int, EngineReader] = {}

    def ask(self, key: int, address: str, path: str = "/metrics") -> EngineReader:
        host, _, port = address.rpartition(":")
        memory = self.memory[key] = EngineReader.create()
        order = link.ReadPage(key, host, int(port), path)
        link.send(self._connection, order, (memory.memory_fd, memory.event_fd))
        return memory

    def end(self, key: int) -> None:
        link.send(self._connection, link.ReadPage(key))

    def heard(self) -> link.PageFound:
        found: link.PageFound = link.decode(self._connection.recv(link.MAX_PACKET_BYTES), link.PageFound)
        return found

    def close(self) -> None:
        self._connection.close()
        for memory in self.memory.values():
            memory.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Child]:
    path = tmp_path / "reader.sock"
    with Processes(tmp_path / "logs") as processes:
        child = processes.start("reader", [sys.executable, "-m", "perseus_reader", f"--socket={path}"])
        child.wait_until(path.exists)
        yield child


@pytest.fixture
def agent(reader: Child, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "reader.sock")
    yield made
    made.close()


@contextlib.contextmanager
def engine(metrics: EngineMetrics, **manner: object) -> Iterator[str]:
    server = MetricsServer("127.0.0.1:0", metrics, Manner(**{"slow": False, **manner}))  # type: ignore[arg-type]
    try:
        yield server.address
    finally:
        server.close()


def steps(memory: EngineReader) -> int:
    found = memory.read()
    assert found is not None
    return found.counts.sequence


def test_it_reads_a_page_again_and_again(agent: Agent) -> None:
    metrics = EngineMetrics()
    metrics.set_load(waiting=2, running=5, kv_share=0.5)
    with engine(metrics) as address:
        memory = agent.ask(1, address)
        assert agent.heard() == link.PageFound(1, "vllm", "meta-llama/Llama-3.1-70B-Instruct")
        eventually(lambda: steps(memory) > 0, "the load is not written")
        before = memory.read()
        assert before is not None
        assert (before.counts.waiting, before.counts.running, before.counts.kv_share_ppm) == (2, 5, 500_000)
        metrics.first_token(0.3, prompt_tokens=10)
        eventually(lambda: (found := memory.read()) and found.first_tokens != before.first_tokens, "no time is counted")
        after = memory.read()
        assert after is not None
        [(place, count)] = counted_between(before.first_tokens, after.first_tokens)
        assert count == 1
        assert place >= place_of(0.3)


def test_a_page_of_no_known_engine_is_said_and_not_written(agent: Agent) -> None:
    with engine(EngineMetrics(), kind=EngineKind.TGI) as address:
        memory = agent.ask(1, address)
        assert agent.heard().fault == "the page is of no engine that is known (sglang, tensorrt-llm, vllm)"
        assert steps(memory) == 0


def test_an_engine_that_goes_is_said_and_its_return_as_well(agent: Agent) -> None:
    metrics = EngineMetrics()
    with engine(metrics) as address:
        memory = agent.ask(1, address)
        assert agent.heard().engine == "vllm"
    assert "cannot be read" in agent.heard().fault
    silent = steps(memory)
    port = int(address.rpartition(":")[2])
    server = MetricsServer(f"127.0.0.1:{port}", metrics, Manner(slow=False))
    try:
        assert agent.heard().engine == "vllm"
        eventually(lambda: steps(memory) > silent, "it is not read again")
    finally:
        server.close()


def test_strangers_delay_nobody_else(agent: Agent) -> None:
    """One accepts and says nothing, one drips a byte at a time, one never ends."""
    metrics = EngineMetrics()
    stop = threading.Event()

    def drip(listener: socket.socket, answer: bytes, pause_s: float) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" if answer else b"")
                    while not stop.wait(pause_s):
                        connection.sendall(answer)

    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for listener, answer, pause_s in zip(listeners, (b"", b"x", b"vllm:" * 10_000), (0.1, 0.1, 0.0), strict=True):
        threading.Thread(target=drip, args=(listener, answer, pause_s), daemon=True).start()
    try:
        with engine(metrics) as address:
            for key, listener in enumerate(listeners, 2):
                agent.ask(key, f"127.0.0.1:{listener.getsockname()[1]}")
            memory = agent.ask(1, address)
            heard = {(found := agent.heard()).key: found for _ in range(4)}
            assert heard[1].engine == "vllm"
            assert all(heard[key].fault for key in (2, 3, 4))
            assert "1,048,576 bytes" in heard[4].fault
            before = steps(memory)
            eventually(lambda: steps(memory) > before + 2, "the honest page is not read")
            assert all(steps(agent.memory[key]) == 0 for key in (2, 3, 4))
    finally:
        stop.set()
        for listener in listeners:
            listener.close()


def test_names_are_not_looked_up_and_orders_end(agent: Agent) -> None:
    agent.ask(1, "localhost:80")
    assert agent.heard() == link.PageFound(1, fault="host: must be an IP address")
    metrics = EngineMetrics()
    with engine(metrics) as address:
        memory = agent.ask(2, address)
        assert agent.heard().engine == "vllm"
        agent.end(2)
        agent.ask(3, address)
        assert agent.heard().key == 3
        ended = steps(memory)
        eventually(lambda: steps(agent.memory[3]) > 3, "the other page is not read")
        assert steps(memory) <= ended + 1, "a page under way may still be written"


def test_when_the_agent_goes_nothing_is_read_and_the_next_one_is_served(agent: Agent, tmp_path: Path) -> None:
    metrics = EngineMetrics()
    with engine(metrics) as address:
        agent.ask(1, address)
        assert agent.heard().engine == "vllm"
        agent.close()
        successor = Agent(tmp_path / "reader.sock")
        try:
            successor.ask(1, address)
            assert successor.heard().engine == "vllm"
        finally:
            successor.close()


def test_it_ends_when_it_is_told_to(reader: Child) -> None:
    assert reader.stop() == 0
    assert os.path.exists(reader.log)

"""An engine's session against an agent that is absent, dead, restarted or too old, over a real socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, eventually

from perseus_client.engine import EngineSession
from perseus_proto.engine_channel import EngineReader
from perseus_proto.engine_hello import EngineHello, receive_any_hello
from perseus_proto.hello import Hello, Reason, encode_refusal, send_welcome

HELLO = EngineHello("test", "1", "model", "tp 1")
LOAD: dict[str, Any] = {"waiting": 0, "prefilling": 0, "running": 3}


class Agent:
    """Welcomes engines for as long as it lives, or refuses them as an agent does that knows none."""

    def __init__(self, path: Path, *, old: bool = False) -> None:
        self.readers: list[EngineReader] = []
        self.hellos: list[Hello | EngineHello] = []
        self._connections: list[socket.socket] = []
        self._old = old
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self.hellos.append(receive_any_hello(connection, PATIENCE_S, None, lambda _: None))
            if self._old:
                connection.sendall(encode_refusal(Reason.MALFORMED, "kind: 4 is no message of this protocol"))
                continue
            reader = EngineReader.create()
            self.readers.append(reader)
            send_welcome(connection, 0, reader.memory_fd, reader.event_fd)

    def die(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._connections:
            connection.close()
        for reader in self.readers:
            reader.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    made = Agent(path)
    yield made
    made.die()


@pytest.fixture
def session(path: Path) -> Iterator[EngineSession]:
    made = EngineSession(str(path), HELLO)
    yield made
    made.close()


def steps(agent: Agent) -> int:
    reading = agent.readers[-1].read()
    assert reading is not None
    return reading.counts.sequence


def beats(agent: Agent) -> int:
    reading = agent.readers[-1].read()
    assert reading is not None
    return reading.beats


def test_what_a_step_did_arrives(agent: Agent, session: EngineSession) -> None:
    assert session.wait_connected(PATIENCE_S)
    session.step(0.25, **LOAD, step_s=0.02, generated_tokens=3, first_tokens_s=[0.4], tokens_s=[0.02, 0.03], requests=2)
    reading = agent.readers[0].read()
    assert reading is not None
    counts = reading.counts
    assert (counts.running, counts.kv_share_ppm, counts.steps, counts.steps_us) == (3, 250_000, 1, 20_000)
    assert (counts.generated_tokens, counts.requests) == (3, 2)
    assert sum(memoryview(reading.first_tokens).cast("I")) == 1
    assert sum(memoryview(reading.tokens).cast("I")) == 2
    assert agent.hellos == [HELLO]


def test_an_engine_without_requests_beats_and_one_that_hangs_with_some_stops(
    agent: Agent, session: EngineSession
) -> None:
    assert session.wait_connected(PATIENCE_S)
    session.step(0.0, waiting=0, prefilling=0, running=0)
    before = beats(agent)
    eventually(lambda: beats(agent) > before + 3)
    session.step(0.0, **LOAD)
    session._busy_until_s = 1e-9  # as if that were long ago
    last = -1
    while last != (last := beats(agent)):  # the thread may be inside its last beat
        threading.Event().wait(0.2)
    session.step(0.0, waiting=0, prefilling=0, running=0)
    eventually(lambda: beats(agent) > last)


def test_without_an_agent_steps_do_nothing_and_with_the_next_one_they_count(path: Path, session: EngineSession) -> None:
    session.step(0.0, **LOAD)
    assert not session.connected
    first = Agent(path)
    assert session.wait_connected(PATIENCE_S)
    session.step(0.0, **LOAD)
    assert steps(first) == 1
    first.die()
    eventually(lambda: not session.connected)
    session.step(0.0, **LOAD)
    second = Agent(path)
    assert session.wait_connected(PATIENCE_S)
    session.step(0.0, **LOAD)
    assert steps(second) == 1
    second.die()


def test_an_agent_that_knows_no_engines_is_asked_again(path: Path, session: EngineSession) -> None:
    old = Agent(path, old=True)
    eventually(lambda: len(old.hellos) >= 2)
    session.step(0.0, **LOAD)
    assert not session.connected
    old.die()


def test_a_wrong_step_closes_the_session_and_raises_nothing(
    agent: Agent, session: EngineSession, caplog: pytest.LogCaptureFixture
) -> None:
    assert session.wait_connected(PATIENCE_S)
    session.step(0.0, waiting=-1, prefilling=0, running=0)
    eventually(lambda: not session.connected)
    session.step(0.0, **LOAD)
    assert caplog.text.count("disabled for the rest of this process") == 1


def test_a_forked_child_says_nothing_and_the_parent_goes_on(agent: Agent, session: EngineSession) -> None:
    assert session.wait_connected(PATIENCE_S)
    session.step(0.0, **LOAD)
    child = os.fork()
    if child == 0:
        session.step(0.0, **LOAD)
        os._exit(0 if not session.connected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert steps(agent) == 1
    session.step(0.0, **LOAD)
    assert steps(agent) == 2

"""The client against an agent that is absent, slow, lying, dead or restarted, over real sockets.

The agent here is a thread that speaks the protocol; what it does with what it learns is tested elsewhere.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.client_agent import SCHEDULE, Agent, drained, iterate
from tests.waiting import PATIENCE_S, eventually

from perseus_client.connector import ANSWER_S
from perseus_client.session import Session
from perseus_core.rank import RankId
from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader, Faults, Phase
from perseus_proto.hello import Hello, Reason


def test_an_iteration_arrives_whole_with_who_and_what(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    agent = agents()
    session = connect(tp=3, gpu_uuid="GPU-x")
    assert session.wait_connected(PATIENCE_S)
    before_us = time.monotonic_ns() // 1000
    for iteration in range(3):
        iterate(session)
        record = drained(agent.readers[0])
        assert (record.iteration, record.complete) == (iteration, True)
        assert before_us <= record.begin_us <= record.begins_us[0] <= record.end_us <= time.monotonic_ns() // 1000
    (hello,) = agent.hellos
    assert (hello.rank, hello.gpu_hint) == (RankId(1, 2, 3), "GPU-x")
    assert [(kind.name.lower(), microbatch, chunk) for kind, microbatch, chunk in hello.schedule] == SCHEDULE


def test_another_clock_is_used_for_all_marks_and_reported(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    agent = agents()
    ticks = iter(range(1000, 10_000))
    session = connect(clock_us=lambda: next(ticks))
    assert session.wait_connected(PATIENCE_S)
    iterate(session)
    record = drained(agent.readers[0])
    assert record.begins_us == tuple(range(1001, 1001 + 2 * len(SCHEDULE), 2))
    assert set(record.durations_us) == {1}
    assert agent.hellos[0].timing is wire.Timing.FOREIGN


def misplaced(session: Session) -> None:
    session.instruction_begin("backward", 0)
    session.instruction_end()


@pytest.mark.parametrize(
    ("deviate", "faults"),
    [
        (misplaced, Faults.OUT_OF_ORDER),
        (lambda session: session.instruction_begin("forward", 99), Faults.UNKNOWN_INSTRUCTION),
        (lambda session: session.instruction_end("sideways", 0), Faults.UNKNOWN_INSTRUCTION),
        (lambda session: session.instruction_end("backward", 3), Faults.OUT_OF_ORDER),
        (lambda session: session.instruction_end(), Faults.OUT_OF_ORDER),
        (lambda session: session.step_begin(), Faults.ABANDONED),
        (lambda session: None, Faults.NONE),  # simply nothing: none of the instructions was called
    ],
)
def test_an_iteration_that_leaves_the_schedule_is_marked_and_the_next_is_whole(
    agents: Callable[..., Agent],
    connect: Callable[..., Session],
    deviate: Callable[[Session], None],
    faults: Faults,
) -> None:
    agent = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    with session.step():
        deviate(session)
    record = drained(agent.readers[0])
    assert not record.complete
    assert faults in record.faults
    iterate(session)
    while not (last := drained(agent.readers[0])).complete:
        pass
    assert last.faults is Faults.NONE


def test_marks_outside_of_steps_are_evaluation_and_change_nothing(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    agent = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    iterate(session)
    where = agent.readers[0].position()
    for kind, microbatch, chunk in SCHEDULE:
        with session.instruction(kind, microbatch, chunk):
            pass
    session.step_end()
    assert agent.readers[0].position() == where
    assert where.phase is Phase.STEP_ENDED
    iterate(session)
    assert [drained(agent.readers[0]).iteration, drained(agent.readers[0]).complete] == [0, True]


def test_default_clocks_are_asked_for_between_iterations_alone(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    agent = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    (reader,) = agent.readers
    iterate(session)
    with session.default_clocks():
        assert reader.asks_default_clocks()
        assert reader.acknowledge()
    assert not reader.asks_default_clocks()
    assert reader.acknowledge(), "the plan's clock is wanted again at once"
    with pytest.raises(KeyError), session.default_clocks():
        raise KeyError("of the check")
    assert not reader.asks_default_clocks()
    with session.step(), session.default_clocks():
        assert not reader.asks_default_clocks(), "inside an iteration the plan counts"
    with session.default_clocks():
        iterate(session)
        assert not reader.asks_default_clocks(), "an iteration ends it"
    with Session().default_clocks():
        pass  # without an agent it does nothing


def test_an_exception_in_training_passes_through_unchanged(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    with pytest.raises(ZeroDivisionError), session.step(), session.instruction("forward", 0):
        raise ZeroDivisionError
    iterate(session)


def test_an_agent_that_comes_later_is_found_and_iterations_are_counted_from_the_first(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    session = connect()
    for _ in range(5):
        iterate(session)
    agent = agents()
    assert session.wait_connected(PATIENCE_S)
    iterate(session)
    assert drained(agent.readers[0]).iteration == 5


def test_an_agent_that_dies_within_a_step_is_replaced_at_the_next(
    agents: Callable[..., Agent], connect: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    first = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    session.step_begin()
    session.instruction_begin("forward", 0)
    first.die()
    eventually(lambda: not session.connected)
    second = agents()
    assert session.wait_connected(PATIENCE_S)
    session.instruction_end()  # still into the memory of the first
    session.step_end()
    assert second.readers[0].position().phase is Phase.NONE
    iterate(session)
    record = drained(second.readers[0])
    assert (record.iteration, record.complete) == (1, True)
    assert "the agent has gone" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        struct.pack("<4sHHI", b"PRSU", 2, wire.Message.WELCOME, 4) + struct.pack("<I", len(SCHEDULE)),
        struct.pack("<4sHHI", b"PRSU", 9, wire.Message.WELCOME, 4) + struct.pack("<I", len(SCHEDULE)),
        wire.encode_hello(Hello(0, 0, 0, wire.Timing.HOST, "", wire.make_schedule(SCHEDULE))),
    ],
    ids=["another protocol", "end of file", "no descriptors", "newer version", "a hello"],
)
def test_an_agent_that_talks_nonsense_is_left_alone(
    agents: Callable[..., Agent], connect: Callable[..., Session], answer: bytes
) -> None:
    def talk(connection: socket.socket, _: Hello) -> None:
        connection.sendall(answer)
        connection.close()

    agent = agents(talk)
    session = connect()
    eventually(lambda: len(agent.hellos) > 1)  # it tries again
    iterate(session)
    assert not session.connected


def test_memory_for_another_schedule_is_not_written(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    small = ChannelReader.create(1)

    def cheat(connection: socket.socket, hello: Hello) -> None:
        wire.send_welcome(connection, len(hello.schedule), small.memory_fd, small.event_fd)

    agent = agents(cheat)
    session = connect()
    eventually(lambda: len(agent.hellos) > 1)
    iterate(session)
    assert not session.connected
    assert small.position().phase is Phase.NONE
    small.close()


def test_a_refusal_is_logged_once_with_its_reason(
    agents: Callable[..., Agent], connect: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(connection: socket.socket, _: Hello) -> None:
        connection.sendall(wire.encode_refusal(Reason.NOT_A_POD, "the process is in no pod"))

    caplog.set_level(logging.WARNING)
    agent = agents(refuse)
    session = connect()
    eventually(lambda: len(agent.hellos) > 2)
    iterate(session)
    assert caplog.text.count("the agent refuses this rank (NOT_A_POD): the process is in no pod") == 1


def test_a_refusal_sent_before_the_hello_was_read_is_logged_with_its_reason(
    agent_socket: Path, connect: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(agent_socket))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        # A hello of many socket buffers: the agent is gone while it is still being sent.
        session = connect(schedule=[("forward", k, 0) for k in range(65_000)])
        connection, _ = listener.accept()
        connection.sendall(wire.encode_refusal(Reason.NOT_A_POD, "the process is in no pod"))
        connection.close()
        eventually(lambda: "the agent refuses this rank (NOT_A_POD): the process is in no pod" in caplog.text)
        session.close()


def test_an_agent_that_accepts_and_never_answers_costs_the_training_loop_nothing(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    agent = agents(lambda connection, hello: None)
    started_s = time.monotonic()
    session = connect()
    for _ in range(100):
        iterate(session)
    assert time.monotonic() - started_s < ANSWER_S / 2
    eventually(lambda: agent.hellos)
    assert not session.connected


def test_an_agent_that_never_looks_costs_the_training_loop_nothing(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    """Every mark rings, nobody answers the bell, records are overwritten."""
    agent = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    agent.readers[0].set_wake_map(b"\x01" * len(SCHEDULE))
    for _ in range(500):
        iterate(session)  # a call that waited for the agent would do so until the test's time is up
    assert drained(agent.readers[0]).complete


def test_a_clock_that_fails_ends_the_session_and_not_the_training(
    agents: Callable[..., Agent], connect: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    def broken_clock() -> int:
        raise OSError("no clock")

    agent = agents()
    session = connect(clock_us=broken_clock)
    assert session.wait_connected(PATIENCE_S)
    iterate(session)
    iterate(session)
    assert caplog.text.count("disabled for the rest of this process") == 1
    assert agent.connections[0].recv(1) == b""  # so that the agent gives the GPU back


def test_threads_may_mark_at_the_same_time(agents: Callable[..., Agent], connect: Callable[..., Session]) -> None:
    agent = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    failures: list[Exception] = []

    def work(offset: int) -> None:
        try:
            for position in range(offset, len(SCHEDULE), 2):
                with session.instruction(*SCHEDULE[position]):
                    pass
        except Exception as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    for _ in range(20):
        with session.step():
            workers = [threading.Thread(target=work, args=(offset,)) for offset in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    assert not failures
    assert session.connected
    iterate(session)
    records = []
    while (record := agent.readers[0].drain_iteration()) is not None:
        records.append(record)
    assert records[-1].complete

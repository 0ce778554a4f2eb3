"""The conversation on the agent's socket: what is sent is what is read, and anything else is one clear error."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_core.instruction import Instruction, InstructionKind
from perseus_proto import frames
from perseus_proto import hello as wire
from perseus_proto.frames import ChannelError, ForeignSender
from perseus_proto.hello import Hello, Reason, Refusal, Timing, Welcome
from perseus_proto.v1alpha1 import agent_pb2

HINT = "GPU-8a9c3d1e-0000-4000-8000-000000000001"


def instructions() -> st.SearchStrategy[Instruction]:
    return st.builds(
        Instruction,
        st.sampled_from(InstructionKind),
        st.integers(0, wire.MAX_MICROBATCH),
        st.integers(0, wire.MAX_CHUNK),
    )


def hellos() -> st.SearchStrategy[Hello]:
    return st.builds(
        Hello,
        dp=st.integers(0, wire.MAX_DP),
        stage=st.integers(0, wire.MAX_STAGE),
        tp=st.integers(0, wire.MAX_TP),
        timing=st.sampled_from(Timing),
        gpu_hint=st.sampled_from(["", HINT]),
        schedule=st.lists(instructions(), min_size=1, max_size=50, unique=True).map(tuple),
    )


SMALL = Hello(1, 2, 3, Timing.HOST, HINT, wire.make_schedule([("forward", 0, 0), ("backward", 0, 0)]))


JOINED = Hello(1, 2, 3, Timing.HOST, HINT, SMALL.schedule, joined=(0,))


def body(hello: Hello) -> bytes:
    return wire.encode_hello(hello)[wire.HEAD_BYTES :]


@given(hellos() | st.just(JOINED))
def test_a_hello_is_read_as_it_was_sent(hello: Hello) -> None:
    frame = wire.encode_hello(hello)
    assert wire.parse_head(frame[: wire.HEAD_BYTES]) == (wire.Message.HELLO, len(frame) - wire.HEAD_BYTES)
    assert wire.decode_hello(frame[wire.HEAD_BYTES :]) == hello


def test_kinds_have_the_numbers_of_the_grpc_wire() -> None:
    assert {kind.name: kind.value for kind in InstructionKind} == {
        name.removeprefix("INSTRUCTION_KIND_"): number
        for name, number in agent_pb2.InstructionKind.items()
        if number != 0
    }


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_are_a_hello_or_one_error(data: bytes) -> None:
    try:
        hello = wire.decode_hello(data)
    except ChannelError:
        return
    assert wire.decode_hello(body(hello)) == hello


def test_a_hundred_thousand_damaged_frames_are_read_or_refused() -> None:
    """Bytes flipped, cut and doubled in good frames: only ChannelError comes out, what is read keeps the bounds."""
    generator = random.Random(20260101)
    good = [wire.encode_hello(SMALL), wire.encode_refusal(Reason.NO_GPU, "no GPU")]
    accepted = 0
    for _ in range(100_000):
        frame = bytearray(generator.choice(good))
        for _ in range(generator.randint(1, 3)):
            position = generator.randrange(len(frame))
            action = generator.randrange(4)
            if action == 0:
                frame[position] = generator.randrange(256)
            elif action == 1:
                frame[position] ^= 1 << generator.randrange(8)
            elif action == 2:
                del frame[position:]
                frame = frame or bytearray(1)
            else:
                frame[position:position] = frame[: generator.randint(1, 8)]
        try:
            message, length = wire.parse_head(bytes(frame[: wire.HEAD_BYTES]))
            content = bytes(frame[wire.HEAD_BYTES :][:length])
            if message is wire.Message.HELLO:
                hello = wire.decode_hello(content)
                assert hello.stage <= wire.MAX_STAGE
                assert len(set(hello.schedule)) == len(hello.schedule)
                accepted += 1
            elif message is wire.Message.REFUSAL:
                assert len(wire.decode_refusal(content).message) <= wire.MAX_MESSAGE_BYTES
        except ChannelError:
            pass
    assert accepted > 1000  # the damage is not so great that nothing else was tried


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp": wire.MAX_DP + 1}, "dp: must be an integer between 0 and 65535"),
        ({"stage": -1}, "stage: must be"),
        ({"tp": True}, "tp: must be"),
        ({"schedule": ()}, "schedule: must have 1 to 65536 instructions, has 0"),
        ({"schedule": SMALL.schedule * 2}, "occurs twice"),
        ({"schedule": wire.make_schedule([("forward", -1, 0)])}, "schedule.microbatch: must be"),
        ({"schedule": wire.make_schedule([("forward", 0, 5000)])}, "schedule.chunk: must be"),
        ({"joined": (1,)}, "joined: must be an integer between 0 and 0, is 1"),
        ({"joined": (-1, 0)}, "joined: must be ascending places"),
        ({"joined": (0, 0)}, "joined: must be ascending places"),
        ({"gpu_hint": "GPU-\n"}, "gpu_hint: must be"),
        ({"gpu_hint": "G" * 97}, "gpu_hint: must be"),
    ],
)
def test_a_field_out_of_bounds_is_named(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(SMALL, name) for name in ("dp", "stage", "tp", "timing", "gpu_hint", "schedule")}
    with pytest.raises(ChannelError, match=message):
        Hello(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("sideways", 0, 0), "kind: 'sideways' is not one of forward, backward"),
        ((9, 0, 0), "kind: 9 is not one of"),
        (("forward", 0), r"schedule\[0\]: must be \(kind, microbatch, chunk\)"),
        (7, r"schedule\[0\]: must be"),
    ],
)
def test_a_schedule_of_something_else_is_refused_by_name(entry: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ChannelError, match=message):
        wire.make_schedule([entry])


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (struct.pack("<4sHHI", b"HTTP", 1, 1, 0), "magic"),
        (struct.pack("<4sHHI", b"PRSU", 1, 1, 0), "version: this side speaks 2, the other 1"),
        (struct.pack("<4sHHI", b"PRSU", 2, 9, 0), "kind: 9"),
        (struct.pack("<4sHHI", b"PRSU", 2, 1, wire.MAX_BODY_BYTES + 1), "length: must be at most"),
        (b"PRSU", "head: must be 12 bytes, is 4"),
    ],
)
def test_a_head_that_breaks_a_rule_is_refused(head: bytes, message: str) -> None:
    with pytest.raises(ChannelError, match=message):
        wire.parse_head(head)


def test_a_refusal_is_understood_from_any_version_and_with_any_reason() -> None:
    frame = bytearray(wire.encode_refusal(Reason.VERSION, "speak 7"))
    frame[4] = 7  # version
    assert wire.parse_head(bytes(frame[: wire.HEAD_BYTES]))[0] is wire.Message.REFUSAL
    frame[wire.HEAD_BYTES] = 200  # reason
    assert wire.decode_refusal(bytes(frame[wire.HEAD_BYTES :])) == Refusal(Reason.OTHER, "speak 7")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with agent, client:
        yield agent, client


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_large_hello_goes_through_a_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, client = pair
    schedule = wire.make_schedule([("forward", m, 0) for m in range(wire.MAX_INSTRUCTIONS)])
    sent = Hello(0, 0, 0, Timing.HOST, "", schedule)
    sender = threading.Thread(target=client.sendall, args=(wire.encode_hello(sent),))
    sender.start()
    assert wire.receive_hello(agent, 60) == sent
    sender.join()


def test_whether_a_rank_s_time_is_its_own_travels_and_a_newer_client_s_flags_mean_nothing() -> None:
    own = replace(SMALL, own_time=True)
    frame = bytearray(wire.encode_hello(own))
    assert wire.decode_hello(bytes(frame[wire.HEAD_BYTES :])) == own
    assert wire.decode_hello(wire.encode_hello(SMALL)[wire.HEAD_BYTES :]) == SMALL
    (place,) = [k for k, (a, b) in enumerate(zip(frame, wire.encode_hello(SMALL), strict=True)) if a != b]
    frame[place] = 0xFE
    assert wire.decode_hello(bytes(frame[wire.HEAD_BYTES :])) == SMALL


def test_a_peer_that_trickles_is_cut_off_in_all_not_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, frame = 0.0, wire.encode_hello(SMALL)

    class Trickling:
        """A connection that has another byte each second."""

        received, patience_s = 0, 0.0

        def settimeout(self, patience_s: float) -> None:
            self.patience_s = patience_s

        def recv(self, _: int) -> bytes:
            nonlocal now_s
            now_s += min(1.0, self.patience_s)
            if self.patience_s < 1.0:
                raise TimeoutError
            self.received += 1
            return frame[self.received - 1 : self.received]

    for module in (wire, frames):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert wire.receive_hello(cast(Any, Trickling()), len(frame) + 1.0) == SMALL
    now_s, slow = 0.0, Trickling()
    with pytest.raises(TimeoutError):
        wire.receive_hello(cast(Any, slow), 10.5)
    assert (now_s, slow.received) == (10.5, 10)


def test_a_peer_that_hangs_up_or_says_something_else_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, client = pair
    client.sendall(wire.encode_refusal(Reason.OTHER, ""))
    with pytest.raises(ChannelError, match="expected a hello, not a refusal"):
        wire.receive_hello(agent, 60)
    client.sendall(wire.encode_hello(SMALL)[:20])
    client.close()
    with pytest.raises((ConnectionResetError, ChannelError)):
        wire.receive_hello(agent, 60)


def test_descriptors_that_a_peer_adds_to_its_hello_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, client = pair
    before = descriptors()
    socket.send_fds(client, [wire.encode_hello(SMALL)], [0, 1, 2])
    assert wire.receive_hello(agent, 60) == SMALL
    assert descriptors() == before


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection whose listener asks the kernel who writes."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        client.connect(str(tmp_path / "agent.sock"))
        agent, _ = listener.accept()
        with agent:
            yield agent, client


def test_a_hello_is_taken_from_the_process_that_connected(told: tuple[socket.socket, socket.socket]) -> None:
    agent, client = told
    before = descriptors()
    socket.send_fds(client, [wire.encode_hello(SMALL)], [0, 1, 2])
    assert wire.receive_hello(agent, 60, os.getpid()) == SMALL
    assert descriptors() == before


@pytest.mark.parametrize("own_bytes", [0, 5, wire.HEAD_BYTES, wire.HEAD_BYTES + 3])
def test_a_hello_that_another_process_writes_is_not_taken(
    told: tuple[socket.socket, socket.socket], own_bytes: int
) -> None:
    agent, client = told
    frame = wire.encode_hello(SMALL)
    client.sendall(frame[:own_bytes])
    child = os.fork()
    if child == 0:
        client.sendall(frame[own_bytes:])
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ForeignSender, match=rf"must be the process that connected, {os.getpid()}, is \[{child}\]"):
        wire.receive_hello(agent, 60, os.getpid())


def test_a_hello_of_an_unknown_sender_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, client = pair
    client.sendall(wire.encode_hello(SMALL))
    with pytest.raises(ForeignSender, match="is unknown"):
        wire.receive_hello(agent, 60, os.getpid())


def test_a_welcome_hands_over_two_descriptors_that_no_child_inherits(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, client = pair
    read_end, write_end = os.pipe()
    wire.send_welcome(agent, 2, read_end, write_end)
    answer = wire.receive_answer(client, 1)
    assert isinstance(answer, Welcome)
    assert answer.instructions == 2
    assert not os.get_inheritable(answer.memory_fd)
    os.write(answer.event_fd, b"x")
    assert os.read(read_end, 1) == b"x"
    for descriptor in (read_end, write_end, answer.memory_fd, answer.event_fd):
        os.close(descriptor)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_welcome_with_other_descriptors_is_refused_and_none_leak(
    pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    agent, client = pair
    frame = struct.pack("<4sHHI", b"PRSU", 2, wire.Message.WELCOME, 4) + struct.pack("<I", 2)
    before = descriptors()
    socket.send_fds(agent, [frame], [0] * count)
    with pytest.raises(ChannelError, match=f"must carry 2 descriptors, carries {count}"):
        wire.receive_answer(client, 1)
    assert descriptors() == before

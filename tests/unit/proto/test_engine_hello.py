"""The hello of an engine: what is sent is what is read, anything else is one clear error, and ranks are told apart."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_proto import engine_hello as wire
from perseus_proto import hello
from perseus_proto.engine_hello import EngineHello, decode_engine_hello, encode_engine_hello, receive_any_hello
from perseus_proto.frames import ChannelError
from perseus_proto.hello import HEAD_BYTES, Hello, Timing, make_schedule

SMALL = EngineHello("vllm", "0.32.0", "llama-70b@main", "tp 4, pp 1", (("dtype", "bfloat16"), ("max_num_seqs", "256")))
RANK = Hello(0, 0, 0, Timing.HOST, "", make_schedule([("forward", 0, 0)]))


def texts(least: int, most: int) -> st.SearchStrategy[str]:
    return st.text(st.characters().filter(str.isprintable), min_size=least, max_size=min(most, 40))


def hellos() -> st.SearchStrategy[EngineHello]:
    flags = st.dictionaries(texts(1, wire.MAX_FLAG_NAME), texts(0, wire.MAX_FLAG_VALUE), max_size=8)
    return st.builds(
        EngineHello,
        texts(1, wire.MAX_ENGINE_NAME),
        texts(1, wire.MAX_ENGINE_VERSION),
        texts(1, wire.MAX_MODEL),
        texts(0, wire.MAX_PARALLELISM),
        flags.map(lambda found: tuple(sorted(found.items()))),
    )


@given(hellos())
def test_a_hello_is_read_as_it_was_sent(engine: EngineHello) -> None:
    assert decode_engine_hello(encode_engine_hello(engine)[HEAD_BYTES:]) == engine


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_are_a_hello_or_one_error(data: bytes) -> None:
    try:
        engine = decode_engine_hello(data)
    except ChannelError:
        return
    assert encode_engine_hello(engine)[HEAD_BYTES:] == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name: must be 1 to 64 printable characters"),
        ({"version": "1\n"}, "version: must be"),
        ({"model": "m" * 513}, "model: must be 1 to 512"),
        ({"flags": (("b", ""), ("a", ""))}, "flags: must be at most 256, in order of their names"),
        ({"flags": (("a", ""), ("a", ""))}, "flags: must be"),
        ({"flags": (("a", "\x1b[2J"),)}, "flags.value: must be"),
    ],
)
def test_a_rule_that_is_broken_is_named(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    with pytest.raises(ChannelError, match=message):
        EngineHello(**{**fields, **change})


def test_a_hello_that_is_too_long_as_a_whole_is_neither_sent_nor_read() -> None:
    flags = tuple((f"{flag:03}", "x" * 500) for flag in range(100))
    with pytest.raises(ChannelError, match="hello: must be at most 32768 bytes"):
        encode_engine_hello(EngineHello("vllm", "1", "m", "", flags))
    with pytest.raises(ChannelError, match="hello: must be at most 32768 bytes"):
        decode_engine_hello(bytes(40_000))


def received(frame: bytes) -> tuple[Hello | EngineHello, list[int]]:
    ours, theirs = socket.socketpair()
    reserved: list[int] = []
    with ours, theirs:
        theirs.sendall(frame)
        return receive_any_hello(ours, 10, None, reserved.append), reserved


def test_the_agent_tells_ranks_and_engines_apart_and_reserves_what_they_announce() -> None:
    frame = encode_engine_hello(SMALL)
    assert received(frame) == (SMALL, [len(frame) - HEAD_BYTES])
    frame = hello.encode_hello(RANK)
    assert received(frame) == (RANK, [len(frame) - HEAD_BYTES])


def test_a_long_engine_is_refused_before_room_is_reserved_for_it() -> None:
    with pytest.raises(ChannelError, match="length: must be at most 32768, is 40000"):
        received(hello.frame(hello.Message.ENGINE_HELLO, bytes(40_000)))


def test_who_expects_a_rank_refuses_an_engine() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_engine_hello(SMALL))
        with pytest.raises(ChannelError, match="kind: expected a hello, not a engine_hello"):
            hello.receive_hello(ours, 10)

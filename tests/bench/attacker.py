"""A training process that forges: records of iterations with absurd times, as fast as it can, and a ring for each.

``python -m tests.bench.attacker SOCKET GPU COUNT KIND`` connects as any trainer does, after a line on its input, and
says when it begins. With ``fds`` for a socket, and descriptors of memory and bell for the GPU, it has joined already.
"""

from __future__ import annotations

import socket
import sys
import time
from array import array
from collections.abc import Iterator

from perseus_core.instruction import Instruction, InstructionKind
from perseus_proto.channel import SLOTS, ChannelWriter
from perseus_proto.channel_layout import BEGIN, END, ENDED, HOST_BEGIN, POSITION, RECORD_SOURCE, SEQUENCE, TIMES
from perseus_proto.hello import Hello, Timing, encode_hello, receive_answer

KINDS = ("equal", "one period", "dips", "at once", "scattered", "huge")
"""Of times: all the same; iterations that begin at one time (events); waits each longer than the one before; all
instructions as long as the iteration; no two iterations alike; beyond any clock."""
EVENTS = 3
SPAN_US = 1_000_000
"""Of an iteration that can be true."""


def times_of(kind: str, count: int, iteration: int, now_us: int) -> tuple[int, int, list[int]]:
    """Begin and end of the step, and begins and ends of its instructions in turn, µs."""
    begin_us = now_us - 20 * SPAN_US + (iteration % 16) * SPAN_US if kind not in ("equal", "one period") else now_us
    step_us = SPAN_US // count
    match kind:
        case "equal" | "one period":
            return begin_us, begin_us, [begin_us] * (2 * count)
        case "huge":
            return 2**63, 2**64 - 1, [2**63] * (2 * count)
        case "at once":
            return begin_us, begin_us + SPAN_US, [begin_us, begin_us + SPAN_US] * count
        case "dips":
            ends = [at * step_us + step_us * at // (2 * count) for at in range(count)]
            begins = [at * step_us for at in range(count)]
        case _:
            begins = [at * step_us for at in range(count)]
            ends = [at + (iteration * 7919 + at) % max(step_us, 1) for at in begins]
    return begin_us, begin_us + SPAN_US, [begin_us + time for pair in zip(begins, ends, strict=True) for time in pair]


def forge(writer: ChannelWriter, count: int, kind: str) -> Iterator[int]:
    """Write record after record; yields the number of each."""
    iteration, started_us = 0, time.monotonic_ns() // 1000
    writer.step_begin(0, started_us)
    writer.words[5] = EVENTS
    prepared = [times_of(kind, count, number, started_us) for number in range(16 if kind == "scattered" else 1)]
    while True:
        iteration += 1
        begin_us, end_us, times = prepared[iteration % len(prepared)]
        shift_us = 0 if kind in ("equal", "one period", "huge") else iteration * SPAN_US % (15 * SPAN_US)
        record = writer._records[iteration % SLOTS]
        record[BEGIN] = record[HOST_BEGIN] = begin_us + shift_us
        record[END], record[ENDED], record[RECORD_SOURCE] = end_us + shift_us, count, EVENTS
        shifted = times if not shift_us else [at_us + shift_us for at_us in times]
        record[TIMES : TIMES + 2 * count] = memoryview(array("Q", shifted))
        record[TIMES + 2 * count :] = memoryview(array("Q", shifted[::2]))
        record[SEQUENCE] = 2 * iteration + 2
        writer.words[POSITION] = (iteration + 1 << 32) + 0x1000000
        writer.ring()
        yield iteration


def main() -> None:
    """Forge for ever."""
    path, gpu, count, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if path == "fds":
        memory_fd, event_fd = map(int, gpu.split(","))
        writer = ChannelWriter(memory_fd, event_fd, count)
    else:
        sys.stdin.readline()
        schedule = tuple(Instruction(InstructionKind.FORWARD, number, 0) for number in range(count))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(encode_hello(Hello(1, 0, 0, Timing.GPU, gpu, schedule)))
        answer = receive_answer(connection, 10.0)
        writer = ChannelWriter(answer.memory_fd, answer.event_fd, count)  # type: ignore[union-attr]
    for number in forge(writer, count, kind):
        if number == 1:
            print("forging", flush=True)


if __name__ == "__main__":
    main()

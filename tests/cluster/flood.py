"""The evil tenant's program: all that a pod without a GPU can send to an agent, until it is killed.

usage: python -c PROGRAM

It runs as text in the trainer's image, so it may import only what that image contains.
"""

from __future__ import annotations

import itertools
import os
import socket
import time

from perseus_proto import hello as wire

AGENT = "/run/perseus/agent.sock"
HELD = 900
"""Connections that are kept: as many as a process may have."""
LARGEST = wire.encode_hello(
    wire.Hello(
        0, 0, 0, wire.Timing.HOST, "",
        tuple(wire.Instruction(wire.InstructionKind.FORWARD, n, 0) for n in range(wire.MAX_INSTRUCTIONS)),
    )
)  # fmt: skip


def send(data: bytes) -> socket.socket | None:
    """Connect and send; None: the agent did not take it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(0.2)
    try:
        connection.connect(AGENT)
        connection.sendall(data)
    except OSError:
        connection.close()
        return None
    return connection


if __name__ == "__main__":
    held: list[socket.socket] = []
    said_s = time.monotonic()
    for number in itertools.count(1):
        # A whole hello, half of one, nothing, noise.
        taken = send((LARGEST, LARGEST[: len(LARGEST) // 2], b"", os.urandom(4096))[number % 4])
        if taken is not None:
            held.append(taken)
        if len(held) > HELD:
            held.pop(0).close()
        if time.monotonic() > said_s + 1:
            said_s = time.monotonic()
            print(f"{number} connections tried, {len(held)} held", flush=True)

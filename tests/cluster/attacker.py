"""The attacker's program: it claims a GPU at the agent in one of several ways and prints one JSON line.

usage: python -c PROGRAM claim|dead|give|take GPU_UUID

It runs as text in the trainer's image, so it may import only what that image contains. It claims the GPU as rank 0 of
stage 0, as the legitimate process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

from perseus_proto import hello as wire
from perseus_proto.frames import ChannelError

AGENT = "/run/perseus/agent.sock"
SHARED = "/shared/passed.sock"
PATIENCE_S = 120.0
STEP = wire.Instruction(wire.InstructionKind.FORWARD, 0, 0)


def connect(path: str = AGENT) -> socket.socket:
    """Connect to a socket, and retry until it exists."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.connect(path)
            return connection
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def claim(connection: socket.socket, gpu: str) -> dict[str, str]:
    """Send a hello for a GPU and return the result."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent may have refused already
        connection.sendall(wire.encode_hello(wire.Hello(0, 0, 0, wire.Timing.HOST, gpu, (STEP,))))
    try:
        answer = wire.receive_answer(connection, PATIENCE_S)
    except (OSError, ChannelError) as error:
        return {"answer": "NOTHING", "message": str(error)}
    if isinstance(answer, wire.Refusal):
        return {"answer": answer.reason.name, "message": answer.message}
    # Not refused at once: a pod without a lease waits, and the agent closes the connection when a lease names the pod.
    connection.settimeout(15)  # a lease of that cluster
    try:
        closed = connection.recv(1) == b""
    except TimeoutError:
        closed = False
    return {"answer": "DISMISSED" if closed else "WAITS", "message": ""}


def of_a_dead_process(gpu: str) -> dict[str, str]:
    """Let a child connect, pass on the connection and die; send the hello when another process has its number."""
    ours, theirs = socket.socketpair()
    announce("ready")
    wait_for("connect")
    if os.fork() == 0:
        own = connect()
        socket.send_fds(theirs, [b"x"], [own.fileno()])
        time.sleep(PATIENCE_S)
        os._exit(0)
    _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
    announce("connected")
    os.wait()
    announce("died")
    wait_for("go")
    return claim(socket.socket(fileno=descriptor), gpu)


def announce(word: str) -> None:
    """Show the test that a step is complete, by a file."""
    open(f"/shared/{word}", "w").close()


def wait_for(word: str) -> None:
    """Wait until the test makes a file."""
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(f"/shared/{word}") and time.monotonic() < deadline:
        time.sleep(0.02)


def give_away() -> dict[str, str]:
    """Connect to the agent, and pass the connection to a process in another pod."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SHARED)
        os.chmod(SHARED, 0o777)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        taker, _ = listener.accept()
        with connect() as own:
            socket.send_fds(taker, [b"x"], [own.fileno()])
        taker.recv(1)  # keep the connection until the other process has used it
    return {"answer": "GIVEN", "message": ""}


def take(gpu: str) -> dict[str, str]:
    """Claim the GPU through the connection of another pod."""
    taker = connect(SHARED)
    _, [descriptor], _, _ = socket.recv_fds(taker, 1, 1)
    result = claim(socket.socket(fileno=descriptor), gpu)
    taker.sendall(b"x")
    return result


if __name__ == "__main__":
    attack, uuid = sys.argv[-2:]
    attacks = {
        "claim": lambda: claim(connect(), uuid),
        "dead": lambda: of_a_dead_process(uuid),
        "give": give_away,
        "take": lambda: take(uuid),
    }
    print(json.dumps(attacks[attack]()), flush=True)

"""What an attacker runs in a pod of its own: ``python -c`` this, with one word and a GPU's UUID. Prints one JSON line.

Sent to the trainer's image by ``test_identity``, as text: only what that image holds may be imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

from perseus_proto import hello as wire

AGENT = "/run/perseus/agent.sock"
SHARED = "/shared/passed.sock"
STEP = wire.Instruction(wire.InstructionKind.FORWARD, 0, 0)


def connection() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(30)
    made.connect(AGENT)
    return made


def claim(made: socket.socket, gpu: str) -> dict[str, str]:
    """Say hello as rank 0 of stage 0 on a GPU; what came of it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may be there already
        made.sendall(wire.encode_hello(wire.Hello(0, 0, 0, wire.Timing.HOST, gpu, (STEP,))))
    try:
        answer = wire.receive_answer(made, 30.0)
    except (OSError, wire.ChannelError) as error:
        return {"answer": "nothing", "message": str(error)}
    if isinstance(answer, wire.Refusal):
        return {"answer": answer.reason.name, "message": answer.message}
    # Not refused at once: a pod that no lease names waits, and may be sent away later.
    made.settimeout(10)
    try:
        gone = made.recv(1) == b""
    except TimeoutError:
        gone = False
    return {"answer": "DISMISSED" if gone else "WAITS", "message": ""}


def of_a_dead_process(gpu: str) -> dict[str, str]:
    """A child connects and dies; its connection, and with it its pid, is used by us."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        socket.send_fds(theirs, [b"x"], [connection().fileno()])
        os._exit(0)
    _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
    os.wait()
    return claim(socket.socket(fileno=descriptor), gpu)


def give_away() -> dict[str, str]:
    """Connect, and pass the connection to whoever comes, who is in another pod."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SHARED)
        os.chmod(SHARED, 0o777)
        listener.listen()
        listener.settimeout(120)
        taker, _ = listener.accept()
        socket.send_fds(taker, [b"x"], [connection().fileno()])
        taker.recv(1)  # alive until it has been used
    return {"answer": "GIVEN", "message": ""}


def take(gpu: str) -> dict[str, str]:
    deadline = time.monotonic() + 120
    taker = socket.socket(socket.AF_UNIX)
    while True:
        try:
            taker.connect(SHARED)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    _, [descriptor], _, _ = socket.recv_fds(taker, 1, 1)
    said = claim(socket.socket(fileno=descriptor), gpu)
    taker.sendall(b"x")
    return said


if __name__ == "__main__":
    word, uuid = sys.argv[-2:]
    acts = {
        "claim": lambda: claim(connection(), uuid),
        "dead": lambda: of_a_dead_process(uuid),
        "give": give_away,
        "take": lambda: take(uuid),
    }
    print(json.dumps(acts[word]()), flush=True)

"""What an attacker runs in a container: ``python -c`` this, with one word and a GPU's UUID. Prints one JSON line.

Sent to the trainer's image by ``test_identity``, as text: only what that image holds may be imported. All claim the
GPU as rank 0 of stage 0, as the rightful process does.
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
PATIENCE_S = 120.0
STEP = wire.Instruction(wire.InstructionKind.FORWARD, 0, 0)


def connection() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            made.connect(AGENT)
            return made
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def claim(made: socket.socket, gpu: str) -> dict[str, str]:
    """Say hello; what came of it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may be there already
        made.sendall(wire.encode_hello(wire.Hello(0, 0, 0, wire.Timing.HOST, gpu, (STEP,))))
    try:
        answer = wire.receive_answer(made, PATIENCE_S)
    except (OSError, wire.ChannelError) as error:
        return {"answer": "NOTHING", "message": str(error)}
    if isinstance(answer, wire.Refusal):
        return {"answer": answer.reason.name, "message": answer.message}
    # Not refused at once: a pod that no lease names yet waits, and is sent away when one does.
    made.settimeout(15)  # a lease of that cluster
    try:
        gone = made.recv(1) == b""
    except TimeoutError:
        gone = False
    return {"answer": "DISMISSED" if gone else "WAITS", "message": ""}


def of_a_dead_process(gpu: str) -> dict[str, str]:
    """A child connects, hands us the connection and is killed. When somebody else has its number, we speak."""
    ours, theirs = socket.socketpair()
    tell("ready")
    hear("connect")
    if os.fork() == 0:
        own = connection()
        socket.send_fds(theirs, [b"x"], [own.fileno()])
        time.sleep(PATIENCE_S)
        os._exit(0)
    _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
    tell("connected")
    os.wait()
    tell("died")
    hear("go")
    return claim(socket.socket(fileno=descriptor), gpu)


def tell(word: str) -> None:
    open(f"/shared/{word}", "w").close()


def hear(word: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(f"/shared/{word}") and time.monotonic() < deadline:
        time.sleep(0.02)


def give_away() -> dict[str, str]:
    """Connect, and pass the connection to whoever comes, who is in another pod."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SHARED)
        os.chmod(SHARED, 0o777)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        taker, _ = listener.accept()
        with connection() as own:
            socket.send_fds(taker, [b"x"], [own.fileno()])
        taker.recv(1)  # alive until it has been used
    return {"answer": "GIVEN", "message": ""}


def take(gpu: str) -> dict[str, str]:
    deadline = time.monotonic() + PATIENCE_S
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

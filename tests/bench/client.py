"""What a mark costs the training thread, against Zeus' way of doing it, in one loop of one process.

Zeus' PipelineFrequencyOptimizer puts the next frequency into a ``multiprocessing.Queue`` that a child process empties;
here its child does nothing else. Ours marks begin and end of every instruction; the agent's end is a process that
sleeps until the bell rings and drains, in the worst case before every instruction. In between the thread computes for
about half a millisecond without the GIL and a little with it: as in training, everybody else has gone to sleep by the
next mark, and most of what a ring costs is the kernel waking another CPU. Zeus' device synchronisation is left out, in
its favour.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import perseus_client
from perseus_agent.__main__ import give_way
from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader

MICROBATCHES = 48
ITERATIONS = 22
WARM_UP = 2
ROUNDS = 3
SCHEDULE: list[tuple[str | int, int, int]] = [
    (kind, microbatch, 0) for microbatch in range(MICROBATCHES) for kind in ("forward", "backward")
]
BUFFER = bytes(2**19)
Key = tuple[str | int, int, int]


def follow(path: str, wake: bool) -> None:
    """The agent's end, in a process of its own: one rank, until it hangs up."""
    give_way()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
        with connection:
            hello = wire.receive_hello(connection, 10)
            reader = ChannelReader.create(len(hello.schedule))
            reader.set_wake_map(bytes([wake]) * len(hello.schedule))
            wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)
            while connection not in select.select([connection, reader.event_fd], [], [])[0]:
                reader.acknowledge()
                reader.position()
                while reader.drain_iteration() is not None:
                    pass


def zeus_child(queue: Any) -> None:
    """Zeus' process: takes the next frequency and would call NVML if it differs."""
    current = None
    while (frequency := queue.get()) is not None:
        if frequency != current:
            current = frequency


def loop(begin: Callable[[Key], object], end: Callable[[Key], object]) -> tuple[list[int], float]:
    """Sorted nanoseconds of every call in a loop shaped like training, and the process' CPU µs per instruction."""
    taken: list[int] = []
    clock = time.perf_counter_ns
    cpu_started_s = 0.0
    for iteration in range(ITERATIONS):
        if iteration == WARM_UP:
            taken.clear()
            cpu_started_s = time.process_time()
        for key in SCHEDULE:
            started = clock()
            begin(key)
            taken.append(clock() - started)
            hashlib.sha256(BUFFER)  # without the GIL
            sum(range(500))
            started = clock()
            end(key)
            taken.append(clock() - started)
    cpu_us = (time.process_time() - cpu_started_s) * 1e6
    return sorted(taken), cpu_us / ((ITERATIONS - WARM_UP) * len(SCHEDULE))


@contextlib.contextmanager
def followed_session(wake: bool) -> Iterator[perseus_client.Session]:
    """A session with an agent's end at the other."""
    context = multiprocessing.get_context("spawn")
    logging.getLogger("perseus_client").setLevel(logging.ERROR)  # it looks for the agent before that has started
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "agent.sock")
        agent = context.Process(target=follow, args=(path, wake))
        agent.start()
        session = perseus_client.connect(0, 0, schedule=SCHEDULE, socket_path=path)
        try:
            if not session.wait_connected(30):
                raise RuntimeError("the agent's end did not answer")
            yield session
        finally:
            session.close()
            agent.join(10)
            agent.close()


def ours(wake: bool) -> tuple[list[int], float]:
    """Marks of a session that an agent follows; the ends of a step are part of its first and last mark."""
    first, last = SCHEDULE[0], SCHEDULE[-1]
    with followed_session(wake) as session:

        def begin(key: Key) -> None:
            if key is first:
                session.step_begin()
            session.instruction_begin(*key)

        def end(key: Key) -> None:
            session.instruction_end(*key)
            if key is last:
                session.step_end()

        return loop(begin, end)


def zeus() -> tuple[list[int], float]:
    """The same loop, telling a frequency before every instruction; Zeus does nothing at its end, which is left out."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=zeus_child, args=(queue,))
    child.start()
    frequencies = {key: 1410 - 15 * (position % 2) for position, key in enumerate(SCHEDULE)}
    puts: list[int] = []
    clock = time.perf_counter_ns

    def begin(key: Key) -> None:
        started = clock()
        queue.put(frequencies[key])
        puts.append(clock() - started)

    _, cpu_us = loop(begin, lambda key: None)
    queue.put(None)
    child.join(10)
    queue.close()
    return sorted(puts[WARM_UP * len(SCHEDULE) :]), cpu_us


def percentile(taken: list[int], share: float) -> float:
    """Of sorted nanoseconds, in microseconds."""
    return taken[int(len(taken) * share)] / 1000


def client_call() -> dict[str, Any]:
    """One mark: with an agent that is woken at every instruction, and with one woken at the ends of a step (quiet).

    Of each the least disturbed of several rounds, taken in turn. ``client_cpu_us`` is the CPU time that an instruction
    adds to the process, all its threads together: two marks of ours, woken, against one of Zeus.
    """
    figures: dict[str, list[float]] = {}
    peers: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        _, bare_us = loop(lambda key: None, lambda key: None)
        (peer, peer_cpu_us), (woken, woken_cpu_us), (quiet, _) = zeus(), ours(True), ours(False)
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            for name, taken in ((f"client_call_{label}_us", woken), (f"client_call_quiet_{label}_us", quiet)):
                figures.setdefault(name, []).append(percentile(taken, share))
                peers.setdefault(name, []).append(percentile(peer, share))
        figures.setdefault("client_cpu_us", []).append(woken_cpu_us - bare_us)
        peers.setdefault("client_cpu_us", []).append(peer_cpu_us - bare_us)
    return {
        name: {
            "value": min(values),
            "unit": "µs",
            "peer": "Zeus: multiprocessing.Queue.put",
            "peer_value": min(peers[name]),
            "ratio": min(peers[name]) / min(values) if min(values) > 0 else None,
        }
        for name, values in figures.items()
    }


FIGURES = {"client": client_call}

"""What a mark costs the training thread, against Zeus' way of doing it and the machine's floor, in one loop of one
process.

Zeus' PipelineFrequencyOptimizer puts the next frequency into a ``multiprocessing.Queue`` that a child process empties;
here its child does nothing else. Ours marks the ends of every step and of every instruction, followed by a real agent
under a plan that changes the clock at every instruction, the worst there can be, or never (quiet). An instruction is
work of five milliseconds without the GIL, two percent longer or shorter each time, and a little with it: as in
training, everybody else has gone to sleep by the next mark and the caches are somebody else's, and waking another CPU
is the dearest thing that a mark can do. Zeus' device synchronisation is left out, in its favour.

The floor is what the machine takes for marks that do nothing: methods that return, and methods that make a single
system call which wakes nobody.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.doubles import recording_gpu
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, plan_set_of, wait_for

import perseus_client
from perseus_client import Session
from perseus_proto.v1alpha1 import agent_pb2 as messages

MICROBATCHES = 48
ITERATIONS = 14
WARM_UP = 5
"""Iterations: the rank joins, its plan begins, and the agent has seen it twice."""
ROUNDS = 3
SCHEDULE: list[tuple[str, int, int]] = [
    (kind, microbatch, 0) for microbatch in range(MICROBATCHES) for kind in ("forward", "backward")
]
CHANGING = [1410 - 15 * (position % 2) for position in range(len(SCHEDULE))]
QUIET = [1410] * len(SCHEDULE)
INSTRUCTION_S = 0.005
JITTER = 0.02


@functools.cache
def work() -> memoryview:
    """Zeroes whose digest takes as long on this machine as the longest instruction."""
    sample = bytes(2**20)
    taken_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        hashlib.sha256(sample)
        taken_s.append(time.perf_counter() - started_s)
    return memoryview(bytes(int(len(sample) * INSTRUCTION_S * (1 + JITTER) / min(taken_s))))


def zeus_child(queue: Any) -> None:
    """Zeus' process: takes the next frequency and would call NVML if it differs."""
    current = None
    while (frequency := queue.get()) is not None:
        if frequency != current:
            current = frequency


def loop(marks: Session) -> list[int]:
    """Sorted nanoseconds of every call in a loop shaped like training."""
    taken: list[int] = []
    data, noise = work(), random.Random(7)
    clock = time.perf_counter_ns
    for iteration in range(ITERATIONS):
        if iteration == WARM_UP:
            taken.clear()
        started = clock()
        marks.step_begin()
        taken.append(clock() - started)
        for kind, microbatch, chunk in SCHEDULE:
            started = clock()
            marks.instruction_begin(kind, microbatch, chunk)
            taken.append(clock() - started)
            hashlib.sha256(data[: int(len(data) * noise.uniform(1 - JITTER, 1 + JITTER) / (1 + JITTER))])
            sum(range(500))
            started = clock()
            marks.instruction_end()
            taken.append(clock() - started)
        started = clock()
        marks.step_end()
        taken.append(clock() - started)
    return sorted(taken)


class Syscall(Session):
    """Marks that make one system call, that of a ring, on a bell that nobody hears."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0)

    def step_begin(self) -> None:
        os.eventfd_write(self._bell, 1)

    step_end = step_begin

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        os.eventfd_write(self._bell, 1)

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        os.close(self._bell)


class ZeusQueue(Session):
    """Tells a frequency before every instruction; Zeus does nothing at its end."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._frequencies = {key: 1410 - 15 * (position % 2) for position, key in enumerate(SCHEDULE)}

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        self._queue.put(self._frequencies[str(kind), microbatch, chunk])


@contextlib.contextmanager
def followed_session(clocks_mhz: list[int]) -> Iterator[Session]:
    """A session that a real agent follows under a plan with these clocks."""
    logging.getLogger("perseus_client").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder), 1) as node:
        node.start_agent("--min-switch-interval-us=0", opener="open_mapped")
        pod = node.add_pod(0, [0])
        node.kubelet.place([os.getpid()], pod.uid)
        with node.stub() as stub:
            stub.AcquireLease(
                messages.AcquireLeaseRequest(job_uid=JOB, job_name="a/b", epoch=1, ttl_ms=600_000, pods=[pod])
            )
            plan_set = plan_set_of([[clocks_mhz]], schedule=SCHEDULE)
            stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=JOB, epoch=1, plan_set=plan_set))
            session = perseus_client.connect(0, 0, schedule=SCHEDULE, socket_path=node.socket)
            try:
                wait_for(lambda: any(rank.gpu_uuid for rank in describe(stub).ranks), "the rank has joined")
                chosen = [messages.Selection(data_parallel_rank=0, point=0)]
                stub.SelectPlan(
                    messages.SelectPlanRequest(job_uid=JOB, epoch=1, plan_id=plan_set.plan_id, selections=chosen)
                )
                yield session
            finally:
                session.close()
        written = len(recording_gpu.read_mapped(Path(folder) / "gpu", gpu_uuid(0)))
        if clocks_mhz is CHANGING and written < (ITERATIONS - WARM_UP) * len(SCHEDULE):
            raise RuntimeError(f"the agent changed the clock {written} times only: it did not follow")


def describe(stub: Any) -> Any:
    return stub.DescribeNode(messages.DescribeNodeRequest())


def ours(clocks_mhz: list[int]) -> list[int]:
    """Marks of a session that an agent follows."""
    with followed_session(clocks_mhz) as session:
        return loop(session)


def zeus() -> list[int]:
    """Zeus' way. It does nothing at the other marks: they are the cheapest, and left out."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=zeus_child, args=(queue,))
    child.start()
    taken = loop(ZeusQueue(queue))
    queue.put(None)
    child.join(10)
    queue.close()
    return taken[-(ITERATIONS - WARM_UP) * len(SCHEDULE) :]


def syscall() -> list[int]:
    """The floor of a mark that tells anybody anything by a system call."""
    marks = Syscall()
    try:
        return loop(marks)
    finally:
        marks.close()


def percentile(taken: list[int], share: float) -> float:
    """Of sorted nanoseconds, in microseconds."""
    return taken[int(len(taken) * share)] / 1000


def client_call() -> dict[str, Any]:
    """One mark: under a plan that changes the clock at every instruction, and under one that never does (quiet); and
    the floor.

    Of each the least disturbed of several rounds, taken in turn.
    """
    ways: dict[str, Callable[[], list[int]]] = {
        "zeus": zeus,
        "call": lambda: ours(CHANGING),
        "call_quiet": lambda: ours(QUIET),
        "floor_syscall": syscall,
        "floor_call": lambda: loop(Session()),
    }
    rounds = [{name: measure() for name, measure in ways.items()} for _ in range(ROUNDS)]
    figures = {}
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        best = {name: min(percentile(one[name], share) for one in rounds) for name in ways}
        for name, value in best.items():
            if name != "zeus":
                figures[f"client_{name}_{label}_us"] = {
                    "value": value,
                    "unit": "µs",
                    "peer": "Zeus: multiprocessing.Queue.put",
                    "peer_value": best["zeus"],
                    "ratio": best["zeus"] / value,
                }
    return figures


FIGURES = {"client": client_call}

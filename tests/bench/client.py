"""The time that a mark takes in the training thread, beside Zeus' method and the machine's floor, in one process.

Zeus' PipelineFrequencyOptimizer puts the next frequency into a ``multiprocessing.Queue``, which a child process reads;
here the child does nothing else. The client marks begin and end of every step and instruction, and a real agent follows
it under a plan that changes the clock at every instruction, which is the worst case, or never (quiet). An instruction
is five milliseconds of work without the GIL, two percent longer or shorter each time, and a little work with it. So, as
in training, the other threads sleep at the next mark and the caches hold other data; waking another CPU is the most
expensive part of a mark. Zeus' device synchronisation is left out, in its favour.

The floor is the time of marks that do nothing: methods that return at once, and methods that make one system call that
wakes no thread.
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
"""Iterations until the rank has joined, its plan has begun, and the agent has followed it twice."""
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
    """Return zeros whose digest takes as long on this machine as the longest instruction."""
    sample = bytes(2**20)
    taken_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        hashlib.sha256(sample)
        taken_s.append(time.perf_counter() - started_s)
    return memoryview(bytes(int(len(sample) * INSTRUCTION_S * (1 + JITTER) / min(taken_s))))


def zeus_child(queue: Any) -> None:
    """Run Zeus' process without a device: take the next frequency and compare it with the last one."""
    current = None
    while (frequency := queue.get()) is not None:
        if frequency != current:
            current = frequency


def loop(marks: Session) -> list[int]:
    """Return the sorted times (ns) of all calls in a loop like that of training."""
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
    """Marks that make one system call, a write to an eventfd on which no thread waits."""

    def __init__(self) -> None:
        self._event_fd = os.eventfd(0)

    def step_begin(self) -> None:
        os.eventfd_write(self._event_fd, 1)

    step_end = step_begin

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        os.eventfd_write(self._event_fd, 1)

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        os.close(self._event_fd)


class ZeusQueue(Session):
    """Puts a frequency into the queue before every instruction; Zeus does nothing at its end."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._frequencies = {key: 1410 - 15 * (position % 2) for position, key in enumerate(SCHEDULE)}

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        self._queue.put(self._frequencies[str(kind), microbatch, chunk])


@contextlib.contextmanager
def followed_session(clocks_mhz: list[int]) -> Iterator[Session]:
    """Return a session that a real agent follows under a plan with these clocks."""
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
            session = perseus_client.connect(0, 0, schedule=SCHEDULE, socket_path=node.socket, timing="synchronised")
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
            raise RuntimeError(f"the agent changed the clock only {written} times: it did not follow the session")


def describe(stub: Any) -> Any:
    return stub.DescribeNode(messages.DescribeNodeRequest())


def perseus(clocks_mhz: list[int]) -> list[int]:
    """Return the times (ns) of marks of a session that an agent follows."""
    with followed_session(clocks_mhz) as session:
        return loop(session)


def zeus() -> list[int]:
    """Return the times (ns) of Zeus' marks. The other marks, at which it does nothing, are left out."""
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
    """Return the times (ns) of marks that make one system call."""
    marks = Syscall()
    try:
        return loop(marks)
    finally:
        marks.close()


def percentile(taken: list[int], share: float) -> float:
    """Return a percentile in µs of sorted times in ns."""
    return taken[int(len(taken) * share)] / 1000


def client_call() -> dict[str, Any]:
    """Measure a mark with a clock change at every instruction, without clock changes, and the floor.

    Each figure is the lowest of several rounds, which are measured in turn.
    """
    ways: dict[str, Callable[[], list[int]]] = {
        "zeus": zeus,
        "call": lambda: perseus(CHANGING),
        "call_quiet": lambda: perseus(QUIET),
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

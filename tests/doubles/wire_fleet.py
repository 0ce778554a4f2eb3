"""A fleet of light agents as a process that answers on a ``Wire``: ``python -m tests.doubles.wire_fleet FD SIZE``.

The agents are those of ``tests.doubles.fleet``: their own leases, epochs and plans. A benchmark that shares the wire
starts the training, makes pipelines slow, and asks how long the agents waited for their next selection.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tests.doubles.fleet import Fleet
from tests.doubles.fleet_size import BLOCKING_W, MICROBATCHES, FleetSize, PlacedJob
from tests.doubles.light_agent import LightAgent
from tests.doubles.light_job import LightJob, LightRank, Work
from tests.doubles.wire import METHODS, Frames, Kind, frame, names

from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

NAMESPACE: Final = "training"
PATIENCE_ITERATIONS: Final = 20
_SLOWED: Final = 1.05
"""A plan that waits for a straggler is slower than its own by more than this; stragglers here are by a fifth."""
_KEEPER_S: Final = 1.0
"""Looking for leases that have run out would take most of the process with thousands of agents."""
_REQUESTS: Final = (
    pb.DescribeNodeRequest,
    pb.AcquireLeaseRequest,
    pb.RenewLeaseRequest,
    pb.ReleaseLeaseRequest,
    pb.PushPlanSetRequest,
    pb.SelectPlanRequest,
    pb.WatchTelemetryRequest,
    pb.SelectPlanRequest,
)


class _Aborted(Exception):
    """What a context's ``abort`` raises: code, details and trailing metadata."""


class _Context:
    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        raise _Aborted(code.name, details, [list(pair) for pair in trailing_metadata])


class WireFleet:
    """Answers the frames of one operator after another."""

    def __init__(self, size: FleetSize) -> None:
        self.fleet = Fleet(keeper_s=_KEEPER_S)
        self.jobs: dict[str, LightJob] = {}
        self._placed = {job.name: job for job in size.jobs}
        self._agents: list[LightAgent] = self.fleet.place(names(size.nodes))
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._training: asyncio.Task[None] | None = None
        self._sent_s: dict[str, float] = {}
        """By job: when the latest message of telemetry was sent (monotonic)."""
        works = {stages: _work(stages) for stages in {job.stages for job in size.jobs}}
        for job in size.jobs:
            self.jobs[job.name] = light = LightJob(NAMESPACE, job.name, _ranks(job), works[job.stages])
            self.fleet.start(light)
        self.frames = Frames(self._received)

    def _received(self, kind: int, method: int, node: int, call: int, payload: bytes) -> None:
        if kind == Kind.CONTROL:
            self._spawn(self._control(json.loads(payload)))
        elif kind == Kind.CANCEL:
            if (stream := self._streams.pop(call, None)) is not None:
                stream.cancel()
        else:
            request: Any = _REQUESTS[method].FromString(payload)
            # On a stream of selections each message is answered as a call would be.
            called = getattr(self._agents[node], METHODS[method] if kind == Kind.REQUEST else "SelectPlan")
            answers = called(request, _Context())
            send = functools.partial(self._send, method, node, call)
            if METHODS[method] == "WatchTelemetry":
                self._streams[call] = asyncio.create_task(self._stream(request.job_uid, answers, send))
            else:
                self._answer(answers, send)

    def _send(self, method: int, node: int, call: int, kind: Kind, data: bytes) -> None:
        self.frames.send(frame(kind, method, node, call, data))

    def _answer(self, work: Coroutine[Any, Any, Any], send: Callable[[Kind, bytes], None]) -> None:
        # Without faults an agent answers without waiting for anything; a task for it would be most of the cost.
        try:
            work.send(None)
        except StopIteration as done:
            send(Kind.MESSAGE, done.value.SerializeToString())
        except _Aborted as aborted:
            send(Kind.FAULT, json.dumps(aborted.args).encode())
        else:
            raise AssertionError("a light agent without faults waits for nothing")

    async def _stream(self, job_uid: str, batches: Any, send: Callable[[Kind, bytes], None]) -> None:
        try:
            async for batch in batches:
                send(Kind.MESSAGE, batch.SerializeToString())
                self._sent_s[job_uid] = time.monotonic()
            send(Kind.END, b"")
        except _Aborted as aborted:
            send(Kind.FAULT, json.dumps(aborted.args).encode())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: None if done.cancelled() else done.result())

    # -------------------------------------------------------------------------------------------------- the benchmark

    async def _control(self, question: Any) -> None:
        answer = getattr(self, question.pop("ask"))(**question)
        if asyncio.iscoroutine(answer):
            answer = await answer
        self.frames.send(frame(Kind.CONTROL, 0, 0, 0, json.dumps(answer).encode()))

    def train(self, iteration_s: float) -> None:
        """Train all jobs, an iteration in so many seconds; 0: stop."""
        if self._training is not None:
            self._training.cancel()
            self._training = None
        if iteration_s:
            self._training = asyncio.create_task(self.fleet._train(iteration_s))

    def settled(self, epoch: int) -> bool:
        """Whether every agent has been commanded under an epoch, and every rank follows a plan."""
        held = all(agent.epoch >= epoch for agent in self._agents)
        return held and all(all(self.fleet.plans(job).values()) for job in self.jobs.values())

    def reports(self) -> int:
        """How many reports were sent: one for each node and iteration."""
        return sum(job.iteration * len(job.ranks) for job in self.jobs.values())

    async def straggle(self, name: str, dp: int, factor: float, uid: str, confirm: int = 2) -> list[float]:
        """Make a pipeline slow from the next iteration on (or, with 1, as fast as planned), and wait until the agents
        of all others have been given plans as slow as it is, or as the others.

        Returns:
            Monotonic seconds: when the ranks began to report the last of the iterations that must agree, when the last
            report was on the wire, when the first agent selected and when the last one did; and how many iterations
            the job had reported by then since it became slow; and how many agents have no such plan even after
            ``PATIENCE_ITERATIONS``.
        """
        job = self.jobs[name]
        others = {node: ranks[0].dp for node, ranks in job.ranks.items() if ranks[0].dp != dp}
        [own, *_] = [node for node, ranks in job.ranks.items() if ranks[0].dp == dp]
        if factor == 1.0:
            job.slowdowns.pop(dp, None)
        else:
            job.slowdowns[dp] = factor
        first = job.iteration
        while job.iteration < first + confirm:
            await asyncio.sleep(0.001)
        begun_s = sent_s = job.stepped_s

        def waits(node: str) -> bool:
            # The slow pipeline keeps its plan; those that wait for it are given a slower one.
            fast_us = self._selected_us(job, own, dp)
            slowed = self._selected_us(job, node, others[node]) > _SLOWED * fast_us
            return slowed is (factor == 1.0)

        left = list(others)
        while left and job.iteration < first + PATIENCE_ITERATIONS:
            while left and not waits(left[-1]):  # each is asked until it has its plan: the agents share this process
                left.pop()
            await asyncio.sleep(0.01)
            if job.iteration == first + confirm:
                sent_s = self._sent_s[uid]
        selected_s = [self.fleet.agents[node].selected_s.get(uid, 0.0) for node in others]
        last_s = time.monotonic() if left else max(selected_s)
        return [begun_s, sent_s, min(selected_s), last_s, job.iteration - first, len(left)]

    def _selected_us(self, job: LightJob, node: str, dp: int) -> int:
        """How long an iteration takes by the plan that an agent was last given for a pipeline; 0: it has none."""
        lease = self.fleet.agents[node].lease_of(job)
        selection = lease.plans.selections.get(dp) if lease else None
        if selection is None or selection.point is None:
            return 0
        return selection.plan_set.points[selection.point].iteration_time_us


def _work(stages: int) -> Work:
    schedule = build_schedule("1f1b", stages=stages, microbatches=MICROBATCHES)
    profile = read_profile(profile_csv(stages), stages=stages)
    return Work.of(build_problem(profile, schedule, blocking_power_w=BLOCKING_W))


def _ranks(job: PlacedJob) -> dict[str, tuple[LightRank, ...]]:
    """A stage of a pipeline on each node, on tensor-parallel GPUs of its own."""
    return {
        f"node-{job.first + number}": tuple(
            LightRank(
                NAMESPACE,
                f"{job.name}-{number}",
                *divmod(number, job.stages),
                f"GPU-{job.name}-{number}-{tp}",
                tp,
                tp,
            )
            for tp in range(job.tensor_parallel)
        )
        for number in range(job.nodes)
    }


async def _serve(end: socket.socket, size: FleetSize) -> None:
    async with (serving := WireFleet(size)).fleet:
        await asyncio.get_running_loop().create_connection(lambda: serving.frames, sock=end)
        await serving.frames.lost.wait()


if __name__ == "__main__":
    gc.disable()  # each agent is a process of its own; a search through thousands would be a pause of all of them
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), FleetSize.of(sys.argv[2])))

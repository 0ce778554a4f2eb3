"""The longest turn of a GPU's thread while its rank forges, in the thread's own processor time; and how soon the GPU of
a forger that was killed is back at its default clocks.

For the first the thread runs in this process and the forger in one of its own, which shares the rank's memory. For the
second everything is real but the GPU.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.attacker import KINDS
from tests.doubles.recording_gpu import CLOCKS_MHZ, RecordingGpu
from tests.doubles.recording_node import RecordingNode, gpu_uuid, plan_set_of, wait_for

from perseus_agent import garbage
from perseus_agent.clocks.gpu_worker import GpuWorker, WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import RankProcess, TelemetryHub
from perseus_core.instruction import Instruction, InstructionKind
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader
from perseus_proto.hello import MAX_INSTRUCTIONS
from perseus_proto.planset import decode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as messages

COUNTS = (4_096, MAX_INSTRUCTIONS)
SECONDS = 3.0
KILLS = 100
KILL_COUNT = 4_096
RANK = RankProcess("evil", "pod", gpu_uuid(0), RankId(1, 0), 1)


def clocks_of(count: int) -> list[int]:
    """A plan that changes with every instruction."""
    dice = random.Random(count)
    return [dice.choice(CLOCKS_MHZ) for _ in range(count)]


def message_of(count: int) -> Any:
    """A plan set for the forger's schedule."""
    return plan_set_of([[clocks_of(count)]], schedule=[("forward", number, 0) for number in range(count)])


def turn_ms(kind: str, count: int) -> float:
    """The longest turn while one rank forges, ms."""
    plans, plan_set = JobPlans(), decode_plan_set(message_of(count))
    plans.push(plan_set)
    plans.select(plan_set.plan_id, {1: 0}, 0, {})
    with tempfile.TemporaryDirectory() as folder:
        journal, _ = Journal.open(Path(folder) / "journal", "boot")
        hub = TelemetryHub(4_096)
        worker = GpuWorker(RecordingGpu(gpu_uuid(0)), journal, WorkerLimits(), hub.publish)
        channel = ChannelReader.create(count)
        schedule = tuple(Instruction(InstructionKind.FORWARD, number, 0) for number in range(count))
        follower = RankFollower(RANK, schedule, channel, plans, machine_clock=True)
        garbage.begin()  # as the agent does
        worker.start()
        worker.attach(follower).result(60)
        fds = channel.memory_fd, os.dup(channel.event_fd)
        command = [sys.executable, "-m", "tests.bench.attacker", "fds", ",".join(map(str, fds)), str(count), kind]
        with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE) as attacker:
            try:
                assert attacker.stdout
                attacker.stdout.readline()
                time.sleep(SECONDS)
            finally:
                attacker.kill()
        worker.detach(follower, "over").result(60)
        worker.stop("over").result(60)
        os.close(fds[1])
        channel.close()
        return 1000 * worker.turn.longest_s


def turns() -> dict[str, Any]:
    """The longest of all kinds of forged times."""
    found = {(kind, count): turn_ms(kind, count) for count in COUNTS for kind in KINDS}
    for (kind, count), value in found.items():
        print(f"  {kind}, {count} instructions: {value:.2f} ms", file=sys.stderr, flush=True)
    worst = max(found, key=lambda key: found[key])
    return _figure(found[worst], f"ms, {worst[0]}")


def kill_s(node: RecordingNode, number: int) -> float:
    """From the death of a forger to the reset of its GPU, s."""
    pod, kind, job = node.add_pod(0, [0]), KINDS[number % len(KINDS)], f"evil-{number}"
    command = [sys.executable, "-m", "tests.bench.attacker", node.socket, gpu_uuid(0), str(KILL_COUNT), kind]
    attacker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        node.kubelet.place([attacker.pid], pod.uid)
        plan_set = message_of(KILL_COUNT)
        with node.stub() as stub:
            request = messages.AcquireLeaseRequest(job_uid=job, job_name="a/b", epoch=1, ttl_ms=60_000, pods=[pod])
            stub.AcquireLease(request)
            stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=job, epoch=1, plan_set=plan_set))
            chosen = [messages.Selection(data_parallel_rank=1, point=0)]
            select = messages.SelectPlanRequest(job_uid=job, epoch=1, plan_id=plan_set.plan_id, selections=chosen)
            stub.SelectPlan(select)
            assert attacker.stdin
            assert attacker.stdout
            attacker.stdin.write(b"go\n")
            attacker.stdin.flush()
            attacker.stdout.readline()
            wait_for(lambda: node.locked()[gpu_uuid(0)], "the GPU is locked")
            killed_ns = time.monotonic_ns()
            attacker.kill()
            wait_for(node.all_default, "the GPU is at its default clocks")
            took_s = max(0, node.calls()[-1].time_ns - killed_ns) / 1e9
            stub.ReleaseLease(messages.ReleaseLeaseRequest(job_uid=job, epoch=1))
        return took_s
    finally:
        attacker.kill()
        attacker.communicate()


def kills() -> dict[str, Any]:
    """How many of the GPUs of killed forgers are at their default clocks within a second, and the longest time."""
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder), gpus=1) as node:
        node.start_agent()
        took_s = [kill_s(node, number) for number in range(KILLS)]
    return {
        "hostile_attacker_kill_s_max": _figure(max(took_s), "s"),
        "hostile_attacker_kills_within_1_s": _figure(sum(one <= 1.0 for one in took_s), f"of {KILLS}"),
    }


def _figure(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


if __name__ == "__main__":
    print(json.dumps({"hostile_turn_ms_max": turns(), **kills()}, indent=1))

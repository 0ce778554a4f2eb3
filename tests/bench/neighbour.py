"""How late the clocks of a GPU change while the rank of another GPU forges: time from a mark to the device call.

Real are the agent process, its sockets and the trainer of the neighbour. The forger (``tests.bench.attacker``) holds a
lease, has sent a long schedule, and writes records of iterations of it, and rings, as fast as it can. Its peer is the
same process without a lease: it then costs the machine as much, but not the agent. The worst of several forgers counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import agent, hostile_turns
from tests.doubles import recording_gpu
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, plan_set_of, wait_for

from perseus_proto.hello import MAX_INSTRUCTIONS
from perseus_proto.v1alpha1 import agent_pb2 as messages

_TRAINER = "import json, sys; from tests.bench import agent; agent.GPUS = 1; agent.train(json.loads(sys.argv[1]))"
ROUNDS = 5
"""In turn with and without a lease, as other programs of the machine change what it can do. The middle one counts."""
FORGERS = (("equal", MAX_INSTRUCTIONS, False), ("one period", 4_096, True), ("dips", 4_096, True))
"""What is forged, of how many instructions, and whether the forger's job has a plan that is followed."""


def reaction_ms(kind: str, count: int, planned: bool, *, leased: bool) -> list[float]:
    """Sorted times from a neighbour's mark to its device call, beside a forger of ``FORGERS``."""
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder), 2) as node:
        node.start_agent("--min-switch-interval-us=0", opener="open_mapped")
        trainer_pod, forger_pod = node.add_pod(0, [0]), node.add_pod(1, [1])
        arguments = json.dumps({"socket": node.socket, "timetable": False, "load": agent.SHORT})
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, arguments], **pipes)
        command = [sys.executable, "-m", "tests.bench.attacker", node.socket, gpu_uuid(1), str(count), kind]
        forger = subprocess.Popen(command, **pipes)
        try:
            node.kubelet.place([trainer.pid], trainer_pod.uid)
            node.kubelet.place([forger.pid], forger_pod.uid)
            plan_set = plan_set_of([[agent.PATTERN]])
            with node.stub() as stub:
                for job, pod in ((JOB, trainer_pod), *((("evil", forger_pod),) if leased else ())):
                    request = messages.AcquireLeaseRequest(
                        job_uid=job, job_name="a/b", epoch=1, ttl_ms=600_000, pods=[pod]
                    )
                    stub.AcquireLease(request)
                stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=JOB, epoch=1, plan_set=plan_set))
                if leased and planned:
                    evil = hostile_turns.message_of(count)
                    stub.PushPlanSet(messages.PushPlanSetRequest(job_uid="evil", epoch=1, plan_set=evil))
                    first = [messages.Selection(data_parallel_rank=1, point=0)]
                    stub.SelectPlan(
                        messages.SelectPlanRequest(job_uid="evil", epoch=1, plan_id=evil.plan_id, selections=first)
                    )
                for child, answer in ((trainer, "True\n"), (forger, "forging\n")):
                    child.stdin.write("go\n")
                    child.stdin.flush()
                    assert child.stdout.readline() == answer
                wait_for(lambda: agent._ranks(stub) == 1 + leased, "the ranks have joined")
                chosen = [messages.Selection(data_parallel_rank=0, point=0)]
                stub.SelectPlan(
                    messages.SelectPlanRequest(job_uid=JOB, epoch=1, plan_id=plan_set.plan_id, selections=chosen)
                )
                trainer.stdin.write("train\n")
                trainer.stdin.flush()
                time.sleep(agent.SHORT.seconds)
                marks = json.loads(trainer.stdout.readline())
        finally:
            for child in (trainer, forger):
                child.kill()
                child.communicate()
        calls = recording_gpu.read_mapped(Path(folder) / "gpu", gpu_uuid(0))
    gpus, agent.GPUS = agent.GPUS, 1
    try:
        return [delay_us / 1000 for delay_us in agent.delays_us(marks, [calls])]
    finally:
        agent.GPUS = gpus


def figures() -> dict[str, Any]:
    """Median and 90th percentile beside the worst forger, and beside the same load."""
    runs, ratios = [], []
    for forger in FORGERS:
        pairs = [[reaction_ms(*forger, leased=leased) for leased in (True, False)] for _ in range(ROUNDS)]
        runs.append([sorted(chain(*side)) for side in zip(*pairs, strict=True)])
        each = sorted(agent.percentile(beside, 0.5) / agent.percentile(alone, 0.5) for beside, alone in pairs)
        ratios.append(median(each))
        print(f"  {forger}: {ratios[-1]:.2f} times, of {each[0]:.2f} to {each[-1]:.2f}", file=sys.stderr, flush=True)
    beside, alone = runs[ratios.index(max(ratios))]
    found = {
        "hostile_neighbour_reaction_ratio": {
            "value": max(ratios),
            "unit": "times",
            "peer": None,
            "peer_value": None,
            "ratio": None,
        }
    }
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        value, peer = agent.percentile(beside, share), agent.percentile(alone, share)
        found[f"hostile_neighbour_reaction_{name}_ms"] = {
            "value": value,
            "unit": "ms",
            "peer": "the same process without a lease",
            "peer_value": peer,
            "ratio": peer / value,
        }
    return found


if __name__ == "__main__":
    print(json.dumps(figures(), indent=1))

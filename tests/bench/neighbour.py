"""How late the clocks of a GPU change while the rank of another GPU forges: time from a mark to the device call.

Real are the agent process, its sockets and the trainer of the neighbour. The forger holds a lease, has sent a schedule
of the most instructions, and writes a valid record of an iteration of these, and rings, as fast as it can. Its peer is
the same process without a lease: it then costs the machine as much, but not the agent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import agent
from tests.doubles import recording_gpu
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, plan_set_of, wait_for

from perseus_proto.v1alpha1 import agent_pb2 as messages

_TRAINER = "import json, sys; from tests.bench import agent; agent.GPUS = 1; agent.train(json.loads(sys.argv[1]))"
_FORGER = """
import socket, sys, time
from perseus_proto.channel import SLOTS, ChannelWriter
from perseus_proto.channel_layout import BEGIN, END, ENDED, POSITION, RECORD_SOURCE, SEQUENCE
from perseus_proto.hello import Hello, Timing, encode_hello, receive_answer
from perseus_proto.instruction import Instruction, InstructionKind
sys.stdin.readline()
count = int(sys.argv[2])
schedule = tuple(Instruction(InstructionKind.FORWARD, number, 0) for number in range(count))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(encode_hello(Hello(1, 0, 0, Timing.SYNCHRONISED, sys.argv[3], schedule)))
answer = receive_answer(connection, 10.0)
writer = ChannelWriter(answer.memory_fd, answer.event_fd, count)
t_us = time.monotonic_ns() // 1000
writer.source = 2
writer.step_begin(0, t_us)
for slot in range(SLOTS):
    record = writer._records[slot]
    record[BEGIN] = record[END] = t_us
    record[ENDED], record[RECORD_SOURCE] = count, 2
    for word in range(8, len(record)):
        record[word] = t_us
print("forging", flush=True)
iteration = 0
while True:
    iteration += 1
    record = writer._records[iteration % SLOTS]
    record[SEQUENCE] = 2 * iteration + 2
    writer.words[POSITION] = (iteration << 32) + 0x4000000
    writer.ring()
"""


def reaction_ms(*, leased: bool) -> list[float]:
    """Sorted times from a neighbour's mark to its device call."""
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder), 2) as node:
        node.start_agent("--min-switch-interval-us=0", opener="open_mapped")
        trainer_pod, forger_pod = node.add_pod(0, [0]), node.add_pod(1, [1])
        arguments = json.dumps({"socket": node.socket, "timetable": False, "load": agent.SHORT})
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, arguments], **pipes)
        forger = subprocess.Popen([sys.executable, "-c", _FORGER, node.socket, "65536", gpu_uuid(1)], **pipes)
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
    """Median and 90th percentile beside a forger, and beside the same load."""
    beside, alone = reaction_ms(leased=True), reaction_ms(leased=False)
    found = {}
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

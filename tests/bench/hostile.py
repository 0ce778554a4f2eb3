"""What hostile tenants can cost: memory of agent and operator, and how long a GPU stays locked after its agent's end.

Real are the agent process, its socket, 64 hostile pods with one process each, and kill -9. Every hostile process sends
hellos of the most instructions, again and again, and keeps each connection that it is given. For the operator, one
process reads the largest inputs that a tenant may write, each of which unpacks to far more than it may take.
"""

from __future__ import annotations

import json
import lzma
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from tests.bench import agent, hostile_turns, neighbour
from tests.doubles.recording_node import RecordingNode, gpu_uuid, plan_set_of, wait_for

from perseus_core.instruction import Instruction, InstructionKind
from perseus_proto.hello import MAX_INSTRUCTIONS, Hello, Timing, encode_hello
from perseus_proto.v1alpha1 import agent_pb2 as messages

Result = dict[str, Any]

PODS = 64
SECONDS = 20.0
AGENT_LIMIT_MIB = 512
OPERATOR_LIMIT_MIB = 4096
"""Memory limits of the chart."""
KILLS = 20
FLOOD_BEGINS_S, FLOOD_S = 2.0, 8.0
FUZZ_S = 120.0
BOMB_BYTES = 1 << 30
_HOSTILE = """
import socket, sys, time
hello, kept = open(sys.argv[2], "rb").read(), []
sys.stdin.readline()
while True:
    try:
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(3)
        one.connect(sys.argv[1])
        one.sendall(hello)
        if one.recv(12)[6:8] == b"\\2\\0":
            kept.append(one)
            kept[:-20] = []
    except OSError:
        time.sleep(0.01)
"""


def agent_peak() -> Result:
    """The agent's largest memory under 64 hostile pods, as a share of its limit."""
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder)) as node:
        node.start_agent()
        hello = Path(folder) / "hello"
        schedule = tuple(Instruction(InstructionKind.FORWARD, number, 0) for number in range(MAX_INSTRUCTIONS))
        hello.write_bytes(encode_hello(Hello(0, 0, 0, Timing.HOST, "", schedule)))
        command = [sys.executable, "-I", "-S", "-c", _HOSTILE, node.socket, str(hello)]
        hostile = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(PODS)]
        try:
            pods = [node.add_pod(100 + number, []) for number in range(PODS)]
            for pod, process in zip(pods, hostile, strict=True):
                node.kubelet.place([process.pid], pod.uid)
            with node.stub() as stub:  # half of them have a job of their own, and so the larger budget
                leased = pods[::2]
                stub.AcquireLease(
                    messages.AcquireLeaseRequest(job_uid="evil", job_name="a/b", epoch=1, ttl_ms=600_000, pods=leased)
                )
            for process in hostile:
                assert process.stdin
                process.stdin.write(b"go\n")
                process.stdin.flush()
            time.sleep(SECONDS)
            status = Path(f"/proc/{node.agent_pid}/status").read_text()
        finally:
            for process in hostile:
                process.kill()
                process.communicate()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return _figure(100 * peak_kib / 1024 / AGENT_LIMIT_MIB, "%")


def socket_cpu() -> Result:
    """The agent's share of a processor while one process of a leased pod connects and sends noise without a pause."""
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder)) as node:
        node.start_agent()
        pod = node.add_pod(100, [])
        with node.stub() as stub:
            request = messages.AcquireLeaseRequest(job_uid="evil", job_name="a/b", epoch=1, ttl_ms=600_000, pods=[pod])
            stub.AcquireLease(request)
        node.start_crowd(pod)
        time.sleep(FLOOD_BEGINS_S)
        before_s, began_s = agent.cpu_s(node.agent_pid), time.monotonic()
        time.sleep(FLOOD_S)
        return _figure(100 * (agent.cpu_s(node.agent_pid) - before_s) / (time.monotonic() - began_s), "%")


def operator_peak() -> Result:
    """The largest memory of a process that reads what tenants may write at most, as a share of the operator's limit."""
    command = [sys.executable, "-m", "tests.bench.hostile"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return _figure(100 * found["peak_kib"] / 1024 / OPERATOR_LIMIT_MIB, "%")


def restore_s() -> Result:
    """The longest time from kill -9 of an agent to the reset of the GPU that it had locked."""
    worst_s = 0.0
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder), gpus=1) as node:
        plan_set, pod = plan_set_of([[[1200, 900]]]), node.add_pod(0, [0])
        trainer: subprocess.Popen[bytes] | None = None
        for kill in range(KILLS):
            node.start_agent()
            trainer = trainer or node.start_trainer(pod, instructions=2, instruction_s=0.01)
            job = f"job-{kill}"
            with node.stub() as stub:
                request = messages.AcquireLeaseRequest(job_uid=job, job_name="a/b", epoch=1, ttl_ms=60_000, pods=[pod])
                stub.AcquireLease(request)
                stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=job, epoch=1, plan_set=plan_set))
                chosen = [messages.Selection(data_parallel_rank=0, point=0)]
                plan_id = plan_set.plan_id
                stub.SelectPlan(messages.SelectPlanRequest(job_uid=job, epoch=1, plan_id=plan_id, selections=chosen))
            wait_for(lambda: node.locked()[gpu_uuid(0)], "the GPU is locked")
            killed_ns = time.monotonic_ns()
            node.kill_agent()
            wait_for(node.all_default, "the GPU is given back")
            worst_s = max(worst_s, (node.calls()[-1].time_ns - killed_ns) / 1e9)
    return _figure(worst_s, "s")


def sized_inputs() -> Result:
    """How many inputs at the limits of their schemas were read, and the largest memory that reading one took."""
    command = [sys.executable, "-m", "tests.sized_inputs", str(FUZZ_S), str(10**6)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    kind, peak_bytes = max(found["peak_bytes"].items(), key=lambda item: item[1])
    return {
        "hostile_inputs_tried": _figure(sum(found["tried"].values()), "inputs"),
        "hostile_inputs_peak_mib": _figure(peak_bytes / (1 << 20), f"MiB, {kind}"),
    }


def _figure(value: float, unit: str) -> Result:
    return {"value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


def _read_hostile_inputs() -> None:
    """In a process of its own: what the operator itself, and what its worker, reads from tenants."""
    from perseus_operator.families.training.work.profiler import _parse_sweep
    from perseus_solver.errors import SolverError
    from perseus_solver.model.result import Frontier

    chunk = bytes(8 << 20)
    for packer, head, read in (
        (zlib.compressobj(9), b"", _parse_sweep),
        (lzma.LZMACompressor(preset=1), b"PRSFRNT\x01", Frontier.from_bytes),
    ):
        bomb = head + b"".join(packer.compress(chunk) for _ in range(BOMB_BYTES // len(chunk))) + packer.flush()
        try:
            read(bomb)
        except SolverError:
            continue
    print(json.dumps({"peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


FIGURES = {
    "hostile_agent_peak_percent_of_limit": agent_peak,
    "hostile_socket_cpu_percent": socket_cpu,
    "hostile_operator_peak_percent_of_limit": operator_peak,
    "hostile_clock_restore_s_max": restore_s,
    "hostile_turn_ms_max": hostile_turns.turns,
    "hostile_attacker_kill": hostile_turns.kills,
    "hostile_neighbour_reaction": neighbour.figures,
    "hostile_inputs": sized_inputs,
}

if __name__ == "__main__":
    _read_hostile_inputs()

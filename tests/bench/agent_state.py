"""What the agent holds and answers: size of plan sets, a plan switch of 1,000 agents, a day of telemetry.

The agents are real processes with real sockets; their GPUs are doubles.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from tests.doubles.recording_node import RecordingNode, plan_set_of

from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.devices.base import EnergyReading
from perseus_agent.devices.energy import EnergyMeter
from perseus_core.iteration import IterationReport
from perseus_proto.planset import PlanPoint, StageSchedule, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

Result = dict[str, Any]

GPUS = 8
AGENT_PROCESSES = 8
JOBS_PER_AGENT = 125


def frontier_like(
    stages: int, instructions: int, points: int
) -> tuple[list[StageSchedule], list[PlanPoint], list[Any]]:
    """Return a synthetic frontier with the statistics of a real one.

    From point to point a few instructions, spread over the schedule, slow down by one or two clocks.
    """
    schedules, clocks = [], []
    for stage in range(stages):
        kinds = tuple(1 + index % 2 for index in range(instructions))
        schedules.append(StageSchedule(stage, kinds, tuple(p // 2 for p in range(instructions)), (0,) * instructions))
        current = [1410 - 15 * ((7 * stage + 3 * (index % 2)) % 20) for index in range(instructions)]
        rows = []
        for point in range(points):
            for number in range(instructions // 16):
                index = (point * 7919 + number * 104_729 + stage * 31) % instructions
                current[index] = max(210, current[index] - 15 * (1 + (index + point) % 2))
            rows.append(list(current))
        clocks.append(rows)
    return schedules, [PlanPoint(1_000_000 + 1_000 * point, 9_000_000 - point) for point in range(points)], clocks


def plan_set_size() -> Result:
    """Measure a whole frontier as one message; the peer sends each selected plan as JSON, as Zeus' server does."""
    schedules, points, clocks = frontier_like(1, 2_048, 100)
    begun_s = time.perf_counter()
    message = encode_plan_set(schedules, points, clocks)
    encoded_s = time.perf_counter() - begun_s
    one_plan = sum(
        len(json.dumps([[kinds, clock] for kinds, clock in zip(schedules[0].kinds, row, strict=True)]))
        for row in clocks[0]
    )
    return {
        "plan_set_bytes_100x2048": {
            "value": message.ByteSize(),
            "unit": "bytes",
            "peer": "JSON of (instruction, frequency), all points",
            "peer_value": one_plan,
            "ratio": one_plan / message.ByteSize(),
        },
        "plan_set_encode_100x2048_ms": {"value": encoded_s * 1000, "unit": "ms"},
    }


def switch_everywhere() -> Result:
    """Measure the time until 1,000 agents have answered a selection.

    They are 1,000 connections and leases, served by 8 real agent processes.
    """
    plan_set = plan_set_of([[[1200, 900]], [[900, 600]]][:1])
    connections: list[tuple[Any, messages.SelectPlanRequest]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for process in range(AGENT_PROCESSES):
            node = stack.enter_context(RecordingNode.open(Path(folder) / str(process), 1))
            node.start_agent()
            for job in range(JOBS_PER_AGENT):
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = stack.enter_context(grpc.insecure_channel(node.addresses["grpc"], options))
                stub, uid = stubs.AgentStub(channel), f"job-{job}"
                pod = messages.Pod(uid=f"pod-{job}", namespace="a", name=f"pod-{job}")
                lease = messages.AcquireLeaseRequest(job_uid=uid, job_name=uid, epoch=1, ttl_ms=600_000, pods=[pod])
                stub.AcquireLease(lease)
                stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=uid, epoch=1, plan_set=plan_set))
                selection = messages.SelectPlanRequest(
                    job_uid=uid,
                    epoch=1,
                    plan_id=plan_set.plan_id,
                    selections=[messages.Selection(data_parallel_rank=0, point=0)],
                )
                connections.append((stub, selection))
        taken_ms = []
        for _ in range(5):
            begun_s = time.perf_counter()
            answers = [stub.SelectPlan.future(selection) for stub, selection in connections]
            for answer in answers:
                answer.result(30)
            taken_ms.append((time.perf_counter() - begun_s) * 1000)
    return {"value": sorted(taken_ms)[len(taken_ms) // 2], "unit": "ms"}


def memory_kib(name: str) -> int:
    """Return a value of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def a_day(_: int = 0) -> float:
    """Return the growth of this process in MiB over 24 h of telemetry of 8 ranks.

    An iteration takes 3 s and has 192 instructions, and the energy counter is read 20 times a second. One subscriber
    reads, and one never does.
    """
    hub = TelemetryHub(4_096)
    reader, _asleep = hub.watch("job"), hub.watch("job")
    meters = [EnergyMeter() for _ in range(GPUS)]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak value
    before_kib = memory_kib("VmRSS")
    for iteration in range(24 * 3600 // 3):
        for gpu, meter in enumerate(meters):
            for sample in range(60):
                now_us = (iteration * 60 + sample) * 50_000
                meter.add(EnergyReading(now_us, now_us // 4))
            durations = tuple(15_000 + iteration % 97 + index for index in range(192))
            hub.publish("job", IterationReport(0, gpu, 0, iteration, 3_000_000, 2_900_000, 750_000, 1, durations))
        reader.take(0)
    return (memory_kib("VmHWM") - before_kib) / 1024


def telemetry_memory() -> Result:
    """Measure the growth in a separate process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return {"value": pool.submit(a_day).result(), "unit": "MiB"}


FIGURES: dict[str, Callable[[], Result]] = {
    "plan_set": plan_set_size,
    "plan_switch_1000_agents_ms": switch_everywhere,
    "telemetry_24h_memory_mib": telemetry_memory,
}

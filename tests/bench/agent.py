"""The agent under load: time from a mark to the device call, and CPU.

Real are the agent process, the client and the sockets. The GPUs are doubles: a call takes a microsecond and is recorded
in shared memory, so that only the agent's own time is measured. The peer is Zeus' method, in the same run and with the
same marks: a ``multiprocessing`` queue for each GPU, and a process that calls the device when the clock changes. The
plan is the worst possible one: every instruction has another clock than the one before. The load is 200 instructions a
second on each of 8 GPUs.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.doubles import recording_gpu
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, plan_set_of, wait_for
from tests.doubles.recording_trainer import schedule_of

from perseus_proto.v1alpha1 import agent_pb2 as messages

Result = dict[str, Any]

GPUS = 8
INSTRUCTIONS = 64
ROUNDS = 3


class Load(NamedTuple):
    """How 8 ranks mark their instructions."""

    rate_hz: float = 200
    """Instructions of each rank."""
    seconds: float = 6.0
    warm_up_s: float = 2.0
    """At the begin, when the timetable is not known yet and nothing is measured."""


SHORT = Load()
LONG = Load(28, 22.0, 10.0)
"""Forwards of 36 ms, as of large models."""
PATTERN = [recording_gpu.CLOCKS_MHZ[index] for index in range(INSTRUCTIONS)]
"""The clock of each instruction. All differ, so that a device call identifies its instruction."""


def percentile(sorted_values: Sequence[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process with all its threads, in seconds, from the scheduler's counters."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def pace(mark: Callable[[int, int], int], load: Load) -> list[list[int]]:
    """Call ``mark(gpu, instruction)`` for every GPU in turn at the rate; return the times of all marks (ns) by GPU."""
    marks: list[list[int]] = [[] for _ in range(GPUS)]
    begun_s, number = time.monotonic(), 0
    while (due_s := begun_s + number / (GPUS * load.rate_hz)) < begun_s + load.seconds:
        time.sleep(max(0.0, due_s - time.monotonic()))
        gpu = number % GPUS
        marks[gpu].append(mark(gpu, number // GPUS))
        number += 1
    return marks


def delays_us(marks: list[list[int]], calls: list[list[recording_gpu.Call]]) -> list[float]:
    """Return the sorted times from each mark (the end of an instruction) to the device call for the next one, in µs."""
    found = []
    for gpu in range(GPUS):
        by_clock: dict[int | None, list[int]] = {}
        for call in calls[gpu]:
            by_clock.setdefault(call.mhz, []).append(call.time_ns)
        for number, time_ns in enumerate(marks[gpu]):
            if time_ns < marks[gpu][0] + SHORT.warm_up_s * 1e9:
                continue
            times = by_clock.get(PATTERN[(number + 1) % INSTRUCTIONS], [])
            index = bisect_left(times, time_ns)
            if index < len(times):
                found.append((times[index] - time_ns) / 1000)
    return sorted(found)


def train(arguments: dict[str, Any]) -> None:
    """Mark instructions as a training process with a session for each GPU of its pod."""
    import perseus_client

    sys.stdin.readline()
    schedule = schedule_of(INSTRUCTIONS)
    clock = {"timing": "synchronised"} if arguments["timetable"] else {"clock_us": lambda: time.monotonic_ns() // 1000}
    sessions = [
        perseus_client.connect(
            gpu, 0, schedule=schedule, socket_path=arguments["socket"], gpu_uuid=gpu_uuid(gpu), **clock
        )
        for gpu in range(GPUS)
    ]
    print(min([session.wait_connected(10) for session in sessions]), flush=True)
    sys.stdin.readline()

    def mark(gpu: int, number: int) -> int:
        session, index = sessions[gpu], number % INSTRUCTIONS
        if index == 0:
            session.step_begin()
        session.instruction_begin(*schedule[index])
        time_ns = time.monotonic_ns()
        session.instruction_end()
        if index == INSTRUCTIONS - 1:
            session.step_end()
        return time_ns

    print(json.dumps(pace(mark, Load(*arguments["load"]))), flush=True)
    sys.stdin.readline()  # until the benchmark has read the agent's CPU time


def perseus(pattern: Sequence[int], load: Load = SHORT, *, timetable: bool = False) -> tuple[list[float], float]:
    """Return the delays in µs and the agent's CPU in percent of a core, under a plan with these clocks.

    Clocks are asked for ahead of time with ``timetable``, and when a mark rings without.
    """
    with tempfile.TemporaryDirectory() as folder, RecordingNode.open(Path(folder), GPUS) as node:
        node.start_agent("--min-switch-interval-us=0", opener="open_mapped")
        pod = node.add_pod(0, range(GPUS))
        command = [
            sys.executable,
            "-m",
            "tests.bench.agent",
            json.dumps({"socket": node.socket, "timetable": timetable, "load": load}),
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdin
            assert trainer.stdout
            node.kubelet.place([trainer.pid], pod.uid)
            with node.stub() as stub:
                request = messages.AcquireLeaseRequest(job_uid=JOB, job_name="a/b", epoch=1, ttl_ms=600_000, pods=[pod])
                stub.AcquireLease(request)
                plan_set = plan_set_of([[pattern]])
                stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=JOB, epoch=1, plan_set=plan_set))
                trainer.stdin.write("connect\n")
                trainer.stdin.flush()
                assert trainer.stdout.readline() == "True\n"
                wait_for(lambda: _ranks(stub) == GPUS, "all ranks have joined")
                pipelines = [messages.Selection(data_parallel_rank=gpu, point=0) for gpu in range(GPUS)]
                stub.SelectPlan(
                    messages.SelectPlanRequest(job_uid=JOB, epoch=1, plan_id=plan_set.plan_id, selections=pipelines)
                )
            trainer.stdin.write("train\n")
            trainer.stdin.flush()
            time.sleep(load.warm_up_s)
            cpu_before_s, before_s = cpu_s(node.agent_pid), time.monotonic()
            time.sleep(load.seconds - load.warm_up_s - 0.5)
            percent = 100 * (cpu_s(node.agent_pid) - cpu_before_s) / (time.monotonic() - before_s)
            marks = json.loads(trainer.stdout.readline())
            trainer.kill()
        calls = [recording_gpu.read_mapped(Path(folder) / "gpu", gpu_uuid(gpu)) for gpu in range(GPUS)]
        return delays_us(marks, calls), percent


def _ranks(stub: Any) -> int:
    return sum(bool(rank.gpu_uuid) for rank in stub.DescribeNode(messages.DescribeNodeRequest()).ranks)


def zeus_child(queue: Any, folder: str, gpu: int) -> None:
    """Run Zeus' process of one GPU: take the next frequency, and call the device if it differs."""
    device = recording_gpu.MappedGpu(gpu_uuid(gpu), Path(folder) / f"{gpu_uuid(gpu)}.calls")
    current = None
    while (frequency := queue.get()) is not None:
        if frequency != current:
            device.lock_clocks(frequency)
            current = frequency


def zeus(load: Load = SHORT) -> tuple[list[float], float]:
    """Return the same figures for Zeus: each mark puts the next frequency into its GPU's queue."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "gpus").write_text(" ".join(map(gpu_uuid, range(GPUS))))
        recording_gpu.open_mapped(folder)
        queues = [context.Queue() for _ in range(GPUS)]
        children = [context.Process(target=zeus_child, args=(queues[gpu], folder, gpu)) for gpu in range(GPUS)]
        for child in children:
            child.start()
        time.sleep(1.5)

        def mark(gpu: int, number: int) -> int:
            time_ns = time.monotonic_ns()
            queues[gpu].put(PATTERN[(number + 1) % INSTRUCTIONS])
            return time_ns

        before_s = sum(cpu_s(child.pid or 0) for child in children)
        marks = pace(mark, load)
        percent = 100 * (sum(cpu_s(child.pid or 0) for child in children) - before_s) / load.seconds
        for queue, child in zip(queues, children, strict=True):
            queue.put(None)
            child.join(10)
            queue.close()
        calls = [recording_gpu.read_mapped(Path(folder), gpu_uuid(gpu)) for gpu in range(GPUS)]
        return delays_us(marks, calls), percent


@functools.cache
def shortest() -> dict[str, tuple[float, float]]:
    """Return the figures of this project and of Zeus under the same load, each the lowest of several rounds."""
    rounds = [(perseus(PATTERN), zeus()) for _ in range(ROUNDS)]
    figures = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        figures[name] = tuple(min(percentile(one[side][0], share) for one in rounds) for side in (0, 1))
    figures["cpu"] = tuple(min(one[side][1] for one in rounds) for side in (0, 1))
    return figures  # type: ignore[return-value]  # two sides each


def message_to_device() -> Result:
    """Measure the time from the end of an instruction to the device call for the next one."""
    figures: Result = {}
    for name in ("p50", "p99"):
        value, peer = shortest()[name]
        figures[f"message_to_device_{name}_us"] = {
            "value": value,
            "unit": "µs",
            "peer": "Zeus: multiprocessing.Queue to a process for each GPU",
            "peer_value": peer,
            "ratio": peer / value,
        }
    return figures


def agent_cpu() -> Result:
    """Measure the agent's CPU for 8 ranks with clock changes, timings, energy and reports; quiet: without changes."""
    peer = shortest()["cpu"][1]
    value = min(perseus(PATTERN, timetable=True)[1] for _ in range(ROUNDS))
    quiet = min(perseus([PATTERN[-1]] * INSTRUCTIONS, timetable=True)[1] for _ in range(ROUNDS))
    slow, slow_peer = perseus(PATTERN, LONG, timetable=True)[1], zeus(LONG)[1]
    return {
        name: {
            "value": perseus_percent,
            "unit": "% core",
            "peer": "Zeus: its 8 processes, which only set clocks",
            "peer_value": zeus_percent,
            "ratio": zeus_percent / perseus_percent,
        }
        for name, perseus_percent, zeus_percent in (
            ("agent_cpu_percent_8gpus_200ips", value, peer),
            ("agent_cpu_percent_8gpus_200ips_quiet", quiet, peer),
            ("agent_cpu_percent_8gpus_28ips", slow, slow_peer),
        )
    }


FIGURES: dict[str, Callable[[], Result]] = {
    "message_to_device": message_to_device,
    "agent_cpu_percent_8gpus_200ips": agent_cpu,
}

if __name__ == "__main__":
    train(json.loads(sys.argv[1]))

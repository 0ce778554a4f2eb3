"""A simulated training job inside one pod of a cluster with simulated GPUs: ``python -m perseus_sim.pod_job``.

The pod asks for one GPU for each pipeline and stage; the device plugin says which they are and where their files lie.
Training is ``job``'s, in virtual time; the agent is met at PERSEUS_SOCKET like by any training process. Prints what
an iteration took, measured on the GPUs and not by the agent. Ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from perseus_proto import keys
from perseus_sim.gpu import ENV_GPUS
from perseus_sim.job import JobSpec, PipelineIteration, RankSpec, TrainingJob
from perseus_sim.processes import Processes
from perseus_solver.problem import build_problem
from perseus_solver.profile import read_profile
from perseus_solver.schedules import build_schedule

_REPORT_S = 5.0


def ranks_of(environment: Mapping[str, str], pipelines: int, stages: int) -> tuple[RankSpec, ...]:
    """One rank for each GPU that the kubelet gave to this container.

    Raises:
        ValueError: they are not as many as the job needs, or not simulated.
    """
    folder = environment.get(ENV_GPUS)
    if not folder:
        raise ValueError(f"{ENV_GPUS}: not set; the pod must ask for simulated nvidia.com/gpu")
    uuids = sorted(filter(None, environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")))
    if len(uuids) != pipelines * stages:
        raise ValueError(f"nvidia.com/gpu: {pipelines} × {stages} are needed, the pod has {len(uuids)}")
    agent = environment.get(keys.ENV_SOCKET, "")
    return tuple(
        RankSpec(number // stages, number % stages, Path(folder) / f"{gpu_uuid}.gpu", agent)
        for number, gpu_uuid in enumerate(uuids)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perseus_sim.pod_job", description=__doc__)
    parser.add_argument("--profile", type=Path, required=True, help="CSV: what instructions take")
    parser.add_argument("--schedule", default="1f1b", help="as in the PerseusJob (default: 1f1b)")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--pipelines", type=int, default=1, help="data-parallel degree (default: 1)")
    parser.add_argument("--blocking-power", type=float, required=True, help="watts of a GPU that waits")
    parser.add_argument("--speed", type=float, default=1.0, help="virtual over wall seconds (default: 1)")
    settings = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        ranks = ranks_of(os.environ, settings.pipelines, settings.stages)
        profile = read_profile(settings.profile, stages=settings.stages)
        schedule = build_schedule(settings.schedule, stages=settings.stages, microbatches=settings.microbatches)
        problem = build_problem(profile, schedule, blocking_power_w=settings.blocking_power)
    except (ValueError, OSError) as error:
        print(f"perseus_sim.pod_job: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        spec = JobSpec(problem, ranks, speed=settings.speed)
        job = TrainingJob(spec, Path(folder), processes)
        job.begin()
        while job.running and not stop.wait(_REPORT_S):
            if line := report(job.samples):
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
        job.stop()
        if job.failure:
            print(f"perseus_sim.pod_job: {job.failure}", file=sys.stderr)
    return 1 if job.failure else 0


def report(samples: queue.SimpleQueue[PipelineIteration]) -> str:
    """What the last iterations took on average; empty: none has ended."""
    taken: list[PipelineIteration] = []
    while not samples.empty():
        taken.append(samples.get())
    if not taken:
        return ""
    last = max(sample.iteration for sample in taken)
    time_s = sum(sample.time_us for sample in taken) / len(taken) / 1e6
    energy_j = sum(sample.energy_mj for sample in taken) / len(taken) / 1e3
    return f"iteration {last}: {time_s:.3f} s, {energy_j:.0f} J for each pipeline"


if __name__ == "__main__":
    sys.exit(main())

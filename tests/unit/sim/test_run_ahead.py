"""Simulated ranks whose hosts launch ahead: client and agent see what a GPU would show, framework by framework."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.client_agent import Agent
from tests.waiting import eventually

from perseus_core.marks import MarkSource
from perseus_core.rank import RankId
from perseus_proto.channel import IterationRecord
from perseus_proto.hello import Timing
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.shared_gpu import GpuSpec, SharedGpu
from perseus_sim.processes import Processes
from perseus_sim.profiles import profile_csv
from perseus_sim.training.hosts import Framework, Hosts
from perseus_sim.training.job import RankSpec, TrainingJob, TrainingSpec, hosts_of
from perseus_sim.training.rank import JobLost
from perseus_sim.training.stream import Event, Stream
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

A100 = MODELS["a100"]
STAGES, MICROBATCHES, FORWARD_S = 2, 4, 0.005
KERNELS, LAUNCH_S = 50, 1e-5
"""Half a millisecond to launch a forward of five."""
PLACED_US = 5_000
"""The client places the GPU's times on the host's clock no better than it can read both at once; what else runs on this
machine may come between.
"""


def problem() -> Problem:
    return build_problem(
        read_profile(profile_csv(stages=STAGES, forward_s=FORWARD_S)),
        build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES),
        blocking_power_w=A100.blocking_power_w,
    )


def hosts(framework: Framework, queue: int = 1_000) -> Hosts:
    return Hosts(framework, launch_s=LAUNCH_S, queue=queue, forward_kernels=KERNELS, backward_kernels=2 * KERNELS)


Follow = Callable[..., dict[int, list[IterationRecord]]]


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Follow]:
    """Train until so many iterations of every stage are recorded; those, by stage."""
    agents = []

    def run(hosts: Hosts, marks: str = "gpu", iterations: int = 6) -> dict[int, list[IterationRecord]]:
        agent = Agent(tmp_path / "agent.sock")
        agents.append(agent)
        found: dict[int, list[IterationRecord]] = {stage: [] for stage in range(STAGES)}
        ranks = []
        for stage in range(STAGES):
            spec = GpuSpec(f"GPU-{stage}", A100.name, A100.clocks_mhz, round(A100.blocking_power_w * 1000))
            path = SharedGpu.create(tmp_path / "gpus", spec).path
            ranks.append(RankSpec(RankId(0, stage), path, str(tmp_path / "agent.sock")))
        with Processes(tmp_path / "logs") as processes:
            spec_of_job = TrainingSpec(
                problem(), tuple(ranks), noise=0.0, hosts=hosts, marks=marks, wait_for_agent_s=60.0
            )
            job = TrainingJob(spec_of_job, tmp_path / "job", processes)
            job.begin()

            def enough() -> bool:
                assert job.failure is None, job.failure
                for hello, reader in zip(agent.hellos, agent.readers, strict=False):
                    while (record := reader.drain_iteration()) is not None:
                        found[hello.stage].append(record)
                    position = reader.gpu_position()
                    assert (position is None) or (marks == "gpu" and position[0] <= reader.position().iteration)
                return all(len(records) >= iterations for records in found.values())

            eventually(enough, "every stage has run its iterations")
            job.stop()
            assert job.failure is None
        assert {hello.timing for hello in agent.hellos} == {Timing.HOST if marks == "host" else Timing.GPU}
        return found

    yield run
    for agent in agents:
        agent.die()


@pytest.mark.parametrize("marks", ["gpu", "events"])
def test_a_host_that_never_waits_is_ahead_by_what_the_gpu_has_yet_to_run(follow: Follow, marks: str) -> None:
    records = follow(hosts(Framework.PYTORCH), marks)
    for of_stage in records.values():
        for record in of_stage:
            assert record.complete
            assert min(record.leads_us) > -PLACED_US
            # The GPU's times are apart by what it computes, the host's by what it launches.
            gaps_us = [b - a for a, b in pairwise(record.begins_us)]
            assert all(gap >= duration for gap, duration in zip(gaps_us, record.durations_us, strict=False))
        for earlier, following in pairwise(of_stage):
            assert earlier.end_us <= following.begin_us, "windows of iterations overlap"
        later = of_stage[2:]
        assert {record.source for record in later} == {MarkSource[marks.upper()]}
        assert max(max(record.leads_us) for record in later) > 1e6 * FORWARD_S


def test_a_full_launch_queue_bounds_the_lead(follow: Follow) -> None:
    """The host holds at most the queue's kernels and those of one instruction that it is launching: so much work it may
    be ahead, and a wait for the other stage in which nothing runs."""
    free, bound = (follow(hosts(Framework.PYTORCH, queue=queue)) for queue in (1_000, 2 * KERNELS))
    for stage in range(STAGES):
        longest = [max(max(record.leads_us) for record in found[stage][2:]) for found in (free, bound)]
        assert longest[1] < longest[0]


def test_megatron_s_host_waits_before_what_it_receives(follow: Follow) -> None:
    host = hosts(Framework.MEGATRON)
    described = hosts_of(problem(), host, "gpu")
    for stage, records in follow(host).items():
        own = described[stage]
        assert own is not None
        assert any(own["waits"])
        for record in records[1:]:
            leads = list(zip(own["waits"], record.leads_us, strict=True))
            assert max(lead for waits, lead in leads if waits) < 1e6 * FORWARD_S
            assert min(lead for _, lead in leads) > -PLACED_US


def test_without_cuda_only_the_host_s_time_is_known(follow: Follow) -> None:
    for records in follow(hosts(Framework.DEEPSPEED), "host").values():
        for record in records:
            assert (record.source, record.leads_us) == (MarkSource.HOST, ())


def test_a_stream_runs_in_order_and_its_end_ends_the_host() -> None:
    now_us = [0.0]
    stream = Stream(lambda: now_us[0], lambda _: None)
    first, second = Event(), Event()
    ran = []
    first.record(stream)
    stream.put(lambda: ran.append(1))
    second.record(stream)
    with pytest.raises(RuntimeError, match="not complete"):
        first.elapsed_time(second)
    for now_us[0] in (1000.0, 2000.0, 4000.0):
        stream.run_next()
    assert (ran, first.elapsed_time(second)) == ([1], 3.0)
    stream.synchronise()
    stream.put(lambda: None)
    ended = []

    def host() -> None:
        with pytest.raises(JobLost):
            stream.synchronise()
        ended.append(True)

    thread = threading.Thread(target=host)
    thread.start()
    stream.close()
    thread.join(60)
    assert ended

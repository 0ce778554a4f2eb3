"""Training jobs of light agents: ranks that train in step by the plan in force, and what they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perseus_agent.clocks.plans import StagePlan
from perseus_core.units import mj_from_j, us_from_s
from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator


@dataclass(frozen=True)
class Work:
    """What every pipeline of a job executes, as its profile has measured it."""

    times_us: Mapping[tuple[int, int, int], int]
    """Of an instruction by stage, kind and clock."""
    default_us: Mapping[int, tuple[int, ...]]
    """By stage: of its instructions at default clocks, the highest."""
    iteration_us: int
    iteration_mj: int
    """Of one iteration of one pipeline at default clocks."""

    @classmethod
    def of(cls, problem: Problem) -> Work:
        """Everything but the plans'."""
        simulator, offsets = Simulator(problem), problem.stage_offset.tolist()
        fastest = np.zeros(problem.instructions, dtype=np.intp)
        durations_us, run = np.rint(1e6 * simulator.duration_s(fastest)).astype(int), simulator.run(fastest)
        return cls(
            times_us={
                (table.stage, int(table.kind), clock): round(1e6 * time_s)
                for table in problem.options
                for clock, time_s in zip(table.frequency_mhz.tolist(), table.time_s.tolist(), strict=True)
            },
            default_us={s: tuple(durations_us[offsets[s] : offsets[s + 1]].tolist()) for s in range(problem.stages)},
            iteration_us=us_from_s(float(run.iteration_time_s)),
            iteration_mj=mj_from_j(float(run.energy_j)),
        )


@dataclass(frozen=True)
class LightRank:
    """A training process: the rank that it says it is, and the GPU and pod it really has."""

    namespace: str
    pod: str
    dp: int
    stage: int
    gpu_uuid: str
    pid: int
    tp: int = 0


@dataclass
class LightJob:
    """A training job whose ranks train in step, iteration by iteration, on some agents.

    An iteration takes the planned time of its slowest pipeline, times that pipeline's slowdown.
    """

    namespace: str
    name: str
    ranks: dict[str, tuple[LightRank, ...]]
    """By node."""
    work: Work
    slowdowns: dict[int, float] = field(default_factory=dict)
    """By data-parallel rank, of pipelines that are slower than planned."""
    iteration: int = 0
    stepped_s: float = 0.0
    """When the ranks reported the latest iteration (monotonic)."""

    @property
    def stages(self) -> int:
        """Of each pipeline."""
        return len(self.work.default_us)


@dataclass(frozen=True)
class Reports:
    """What the ranks of a node report of an iteration; other nodes say the same but for who they are.

    Each report is with the place of its rank among those of the node.
    """

    single: Sequence[tuple[int, Any]]
    combined: Sequence[tuple[int, Any]]
    """One for the tensor-parallel ranks of a stage: a node has one pipeline of a job."""

    @classmethod
    def of(cls, events: Sequence[Any]) -> Reports:
        """Of single reports."""
        return cls(list(enumerate(events)), _combined(events))


def durations_us(work: Work, rank: LightRank, plan: StagePlan | None) -> Sequence[int]:
    if plan is None:
        return work.default_us[rank.stage]
    kinds = plan.schedule.kinds
    return [work.times_us[rank.stage, kind, clock] for kind, clock in zip(kinds, plan.clocks_mhz, strict=True)]


def report_of(rank: LightRank, event: Any, iteration: int) -> Any:
    """A report as this rank makes it."""
    copy = pb.TelemetryEvent()
    copy.CopyFrom(event)
    report = copy.iteration
    report.data_parallel_rank, report.gpu_uuid, report.iteration = rank.dp, rank.gpu_uuid, iteration
    return copy


def rank_of(rank: LightRank, pod_uid: str, iteration: int) -> Any:
    return pb.Rank(
        pod_uid=pod_uid,
        gpu_uuid=rank.gpu_uuid,
        data_parallel_rank=rank.dp,
        stage=rank.stage,
        tensor_parallel_rank=rank.tp,
        iteration=iteration,
        pid=rank.pid,
    )


def _combined(events: Sequence[Any]) -> list[tuple[int, Any]]:
    """As ``perseus_agent.clocks.stage_reports`` does it, of ranks that are alike in everything but their energy."""
    stages: dict[int, list[int]] = {}
    for place, event in enumerate(events):
        stages.setdefault(event.iteration.stage, []).append(place)
    combined = []
    for places in stages.values():
        ranks = [events[place].iteration for place in places]
        together = pb.TelemetryEvent()
        together.CopyFrom(events[places[0]])
        if len(ranks) > 1:
            together.iteration.energy_mj = sum(rank.energy_mj for rank in ranks)
            together.iteration.computing_us = sum(sum(rank.durations_us) for rank in ranks)
            together.iteration.tensor_parallel_ranks.extend(rank.tensor_parallel_rank for rank in ranks)
        combined.append((places[0], together))
    return combined

"""The shape of a job, from its training processes: where its spec leaves it out, or they do not fit it.

A process says its own place and what it executes, but not how many others there are. Those that are connected are all
of them once there are as many as the spec says, or their places leave no gap, and each has finished an iteration: no
process of a synchronous training finishes one without all the others.

Processes that fit no pipeline have whole iterations in common. So these are planned, with one clock for all GPUs, as if
the job were one pipeline of one stage that all of its ranks share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Online, Profile, ProfileRef
from perseus_operator.api.pipeline import NO_PIPELINE, Pipeline, ScheduleName, whole_iterations
from perseus_operator.api.schema import dump, parse
from perseus_operator.api.status import MAX_MISFIT, ShapeStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.errors import InvalidSpec
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.waiting import absence, silent_pods
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import DeclaredSchedule, is_whole_step
from perseus_proto.planset import MAX_STAGES

_WHOLE: Final = "-steps"
"""Ends the name of a profile of whole iterations, where the job's own is of a pipeline."""
_MOST_NAME: Final = 253
"""Characters of an object's name."""


@dataclass(frozen=True)
class Misfit:
    """Training processes that fit no pipeline.

    Attributes:
        why: what does not fit, in a sentence.
        places: of each rank in the one stage that they are planned as; empty: not known yet.
    """

    why: str
    places: Mapping[RankId, RankId] = field(default_factory=dict)

    @classmethod
    def of(cls, why: str, ranks: Iterable[RankId]) -> Misfit:
        """What does not fit, and all ranks of the job."""
        return cls(why, {rank: RankId(0, 0, place) for place, rank in enumerate(sorted(ranks))})

    @property
    def shape(self) -> Pipeline:
        """What is planned instead."""
        return whole_iterations(len(self.places))

    @cached_property
    def stages(self) -> int:
        """How many stages there are plans for, by what the ranks say of themselves: all have the same."""
        return 1 + max((rank.stage for rank in self.places), default=-1)

    @cached_property
    def pipelines(self) -> frozenset[int]:
        """The pipelines (dp) that the ranks say of themselves."""
        return frozenset(rank.dp for rank in self.places)

    def placed(self, report: IterationReport) -> IterationReport | None:
        """A rank's report as that of a whole iteration, in its place; None: it is of another rank."""
        places = [self.places.get(rank) for rank in report.rank_ids]
        numbers = [place.tp for place in places if place is not None]
        if len(numbers) < len(places):
            return None
        alone = report.energy_mj is not None and not report.together
        return replace(
            report,
            dp=0,
            stage=0,
            tp=numbers[0],
            together=tuple(numbers) if report.together else (),
            durations_us=(report.iteration_time_us,),
            instruction_energies_mj=(report.energy_mj or 0,) if alone else (),
            energy_iterations=1 if alone else 0,
            quiet_us=0,
            quiet_mj=0,
            own_time=False,
        )


@dataclass
class ShapeProgress:
    """What is known of a job's shape. Changed only by its own methods."""

    reported: Pipeline | None = None
    """By the training processes; None: not known, or what the spec says."""
    misfit: Misfit | None = None
    """Why that is the shape of whole iterations; None: the training processes fit, or it is not known."""
    stated: Pipeline | None = None
    """By the spec; None: there is none yet."""
    is_outdated: bool = True
    """Whether processes have joined since all were compared, or the spec says something else."""

    def outdated(self) -> None:
        """The training processes are to be compared again."""
        self.is_outdated = True

    def stated_as(self, stated: Pipeline) -> None:
        """The spec says this, or leaves it to the training processes."""
        self.is_outdated = self.is_outdated or stated != self.stated
        self.stated = stated

    def comparison_started(self) -> None:
        """What all training processes execute is being compared."""
        self.is_outdated = False

    def all_reported(self, shape: Pipeline, misfit: Misfit | None) -> bool:
        """All training processes together have this shape, the spec's own if they fit it; whether it is another."""
        before = self.reported, self.misfit is None
        fits = self.stated is not NO_PIPELINE and shape == self.stated
        self.reported, self.misfit = None if fits else shape, misfit
        self.is_outdated = False
        return before != (self.reported, misfit is None)

    def is_wanted(self, *, begun: bool) -> bool:
        """Whether the training processes are to be compared now. With a spec that shows once they have ``begun``."""
        return self.is_outdated and self.stated is not None and (begun or self.stated is NO_PIPELINE)

    def placed(self, report: IterationReport) -> IterationReport | None:
        """A rank's report as the job is planned: of a whole iteration, where it is that; None: it does not count."""
        return report if self.misfit is None else self.misfit.placed(report)


def outside(ranks: Iterable[RankId], shape: Pipeline) -> str:
    """Name a rank that a pipeline does not have, in a sentence; empty: it has all."""
    limits = shape.data_parallel, shape.stages, shape.tensor_parallel
    odd = next((rank for rank in ranks if any(map(operator.ge, rank, limits))), None)
    if odd is None:
        return ""
    return (
        f"A training process is {odd}; spec.pipeline has {shape.data_parallel} (dp) × {shape.stages}"
        f" (stages) × {shape.tensor_parallel} (tp)."
    )


def shape_of_ranks(job: Job, stated: Pipeline = NO_PIPELINE) -> Pipeline | Misfit | Explanation:
    """The shape that all training processes together report, or why it is not known yet.

    Args:
        job: with its nodes.
        stated: the shape that the spec has, which is returned if nothing but the order of instructions may differ.
    """
    nodes = job.nodes
    if not nodes.occupied:
        return absence(job)
    ranks = nodes.ranks
    ids = {rank.id for rank in ranks}
    if len(ids) < len(ranks):
        return Explanation(Reason.RANKS_MISMATCH, f"Two of {len(ranks)} training processes have the same rank.")
    places = [1 + max(numbers) for numbers in zip(*ids, strict=True)]
    declared = declared_schedules(nodes)
    expected = math.prod(places)
    if stated is not NO_PIPELINE:
        expected = stated.places if len(ranks) <= stated.places else expected
    if (lacking := _lacking(nodes, places, expected, list(declared.values()))) is not None:
        message = f"{len(ranks)} training processes have connected{lacking}. The shape of the job is taken from them."
        return Explanation(Reason.WAITING_FOR_RANKS, message)
    whole = sum(map(is_whole_step, declared.values()))
    if stated is NO_PIPELINE:
        return _reported(places, declared, whole)
    return _compared(stated, places, declared, whole)


def declared_schedules(nodes: JobNodes) -> dict[RankId, DeclaredSchedule]:
    """What each rank says that it executes, as far as it is known."""
    return {
        rank: schedule
        for node in nodes.values()
        for rank, schedule in node.declared_schedules.items()
        if rank in node.ranks
    }


def _lacking(nodes: JobNodes, places: Sequence[int], expected: int, declared: Sequence[DeclaredSchedule]) -> str | None:
    """What is to come before the training processes are known to be all, as the end of a sentence; None: nothing."""
    ranks, occupied = nodes.ranks, nodes.occupied
    have_rank = {rank.pod_uid for rank in ranks}
    silent = any(pod.asks_for_gpu and pod.uid not in have_rank for node in occupied for pod in node.pods)
    if not ranks or silent or any(node.leased_pods != node.pods for node in occupied):
        return silent_pods(nodes)
    if len(ranks) < expected:
        return ", of {} (dp) × {} (stages) × {} (tp)".format(*places)
    if any(rank.iteration < 1 for rank in ranks):
        return ", and not each has finished an iteration"
    if len(declared) < len(ranks) or not all(declared):
        return ", and have not all said what they execute"
    return None


def _reported(
    places: Sequence[int], declared: Mapping[RankId, DeclaredSchedule], whole: int
) -> Pipeline | Misfit | Explanation:
    """The shape of a job whose spec has none."""
    pipelines, stages, split = places
    if 0 < whole < len(declared):
        return Misfit.of(f"{whole} of {len(declared)} training processes mark whole iterations alone.", declared)
    if whole and stages > 1:
        return Misfit.of(f"The training processes of {stages} stages mark whole iterations alone.", declared)
    raw = {
        "schedule": (ScheduleName.STEPS if whole else ScheduleName.FROM_RANKS).value,
        "stages": stages,
        "dataParallel": pipelines,
        "tensorParallel": split,
    }
    try:
        return parse(Pipeline, raw, "The training processes")
    except InvalidSpec as error:
        return Explanation(Reason.RANKS_MISMATCH, f"{error}.")


def _compared(
    stated: Pipeline, places: Sequence[int], declared: Mapping[RankId, DeclaredSchedule], whole: int
) -> Pipeline | Misfit | Explanation:
    """The shape of a job whose spec has one, as far as places and kinds of marks show whether the ranks fit it."""
    _, stages, split = places
    odd = outside(declared, stated)
    if stages > MAX_STAGES:
        return Explanation(Reason.RANKS_MISMATCH, odd)
    more = (stages, split) == (stated.stages, stated.tensor_parallel) and len(declared) > stated.places
    if more and not whole:
        return Explanation(Reason.RANKS_MISMATCH, odd)  # dataParallel may be edited, and the plans stay what they are
    if odd:
        return Misfit.of(odd, declared)
    if whole and stated.schedule is not ScheduleName.STEPS:
        marks = (
            "The training processes mark" if whole == len(declared) else f"{whole} of {len(declared)} processes mark"
        )
        return Misfit.of(f"{marks} whole iterations alone, and not the instructions of spec.pipeline.", declared)
    return stated


def shape_to_status(progress: ShapeProgress) -> ShapeStatus | None:
    """The shape as the status stores it; None: it is not known, or the spec has it."""
    shape, misfit = progress.reported, progress.misfit
    if shape is None or shape.schedule is None:
        return None
    return ShapeStatus(
        schedule=shape.schedule.value,
        stages=shape.stages,
        data_parallel=shape.data_parallel,
        tensor_parallel=shape.tensor_parallel,
        misfit=None if misfit is None else misfit.why[:MAX_MISFIT],
    )


def shape_from_status(stored: object) -> ShapeProgress:
    """The shape that an earlier operator stored, as far as it can be true."""
    shape = parse_stored(ShapeStatus, stored)
    if shape is None:
        return ShapeProgress()
    if shape.misfit is not None:
        return ShapeProgress(whole_iterations(shape.tensor_parallel), Misfit(shape.misfit))
    return ShapeProgress(parse_stored(Pipeline, dump(shape)))


def completed(spec: JobSpec, name: str, shape: ShapeProgress) -> JobSpec:
    """The spec of the PerseusJob of this name with what it leaves out, or with what is planned instead."""
    full_spec = spec.completed(name, shape.reported)
    if shape.misfit is None:
        return full_spec
    return replace(full_spec, profile=_profile_of_whole_iterations(spec.profile, name))


def is_shared(profile: Profile) -> bool:
    """Whether what is measured for it is stored for other jobs too."""
    return profile.profile_ref is not None and profile.online is not None


def _profile_of_whole_iterations(profile: Profile, job: str) -> Profile:
    """Where a job has its profile whose training processes fit no pipeline: beside its own, so that none is taken for
    the other. It is measured even if its own is only read: nobody can have it stored before.
    """
    shared = profile.profile_ref if is_shared(profile) else None
    name = (job if shared is None else shared.name)[: _MOST_NAME - len(_WHOLE)].rstrip("-.") + _WHOLE
    return Profile(profile_ref=ProfileRef(name=name), online=profile.online or Online.default())

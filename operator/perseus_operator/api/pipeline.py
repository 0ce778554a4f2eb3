"""The part of a PerseusJob's spec that describes the shape of the training.

A schedule has a name that the solver knows, or is a custom schedule: a CSV in a ConfigMap, or what the training
processes report.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from perseus_core import keys
from perseus_operator.api.schema import DNS_NAME, Rule, choice, integer, nested, text

MAX_PLACES = 131_072
"""GPUs of one job. The operator holds some hundred bytes of each."""
MAX_CELLS = 1_048_576
"""Forward passes in one iteration of one pipeline."""
_FIXED = "is immutable: the training processes run this pipeline; create another PerseusJob for another pipeline"


class ScheduleName(StrEnum):
    """Pipeline schedules: those that the solver knows, and the one that the training processes report."""

    ONE_F_ONE_B = "1F1B"
    GPIPE = "GPipe"
    INTERLEAVED = "Interleaved1F1B"
    EARLY_RECOMPUTE = "EarlyRecompute1F1B"
    ZB_H1 = "ZBH1"
    ZB_V = "ZBV"
    DUALPIPE = "DualPipe"
    STEPS = "Steps"
    FROM_RANKS = "FromRanks"

    @property
    def solver_name(self) -> str:
        """What ``perseus_solver.schedules`` calls it."""
        return "custom" if self is ScheduleName.FROM_RANKS else self.value


@dataclass(frozen=True, kw_only=True)
class ScheduleRef:
    """The ConfigMap that stores a schedule, in the namespace of the PerseusJob."""

    name: str = text(
        "Name of the ConfigMap.",
        rule="the name of a ConfigMap",
        max_length=253,
        pattern=DNS_NAME,
    )
    key: str = text(
        "Key that holds the CSV.",
        rule="a ConfigMap key",
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        default=keys.SCHEDULE_KEY,
    )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The shape of the training job."""

    schedule: ScheduleName | None = choice(
        "Pipeline schedule of every pipeline, by name; Steps: there is none, each rank is a pipeline of one stage whose"
        " iterations are whole; FromRanks: the one that the training processes report.",
        ScheduleName,
        required=False,
        immutable=f"schedule {_FIXED}",
    )
    schedule_ref: ScheduleRef | None = nested(
        "ConfigMap that holds the schedule as torch.distributed.pipelining exports it: CSV, one line for each stage.",
        ScheduleRef,
        required=False,
        immutable=f"scheduleRef {_FIXED}",
    )
    stages: int = integer(
        "Pipeline stages (pipeline-parallel degree).", minimum=1, maximum=1024, immutable=f"stages {_FIXED}"
    )
    microbatches: int | None = integer(
        "Microbatches of each pipeline in one iteration; may be left out for a custom schedule, which contains it, and"
        " must be for schedule Steps.",
        minimum=1,
        maximum=65536,
        required=False,
        immutable=f"microbatches {_FIXED}",
    )
    chunks: int | None = integer(
        "Model chunks (virtual stages) on each stage, only for schedule Interleaved1F1B.",
        minimum=2,
        maximum=64,
        required=False,
        immutable=f"chunks {_FIXED}",
    )
    data_parallel: int = integer("Number of pipelines (data-parallel degree).", minimum=1, maximum=65536, default=1)
    tensor_parallel: int = integer(
        "GPUs that share each stage (tensor-parallel degree); each runs its stage's plan.",
        minimum=1,
        maximum=1024,
        default=1,
        immutable=f"tensorParallel {_FIXED}",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.schedule) != has(self.scheduleRef)",
            "exactly one of schedule and scheduleRef must be set",
            lambda p: (p.schedule is not None) != (p.schedule_ref is not None),
        ),
        Rule(
            f"(has(self.schedule) && self.schedule == '{ScheduleName.INTERLEAVED}') == has(self.chunks)",
            f"chunks must be set if and only if schedule is {ScheduleName.INTERLEAVED}",
            lambda p: (p.schedule is ScheduleName.INTERLEAVED) == (p.chunks is not None),
        ),
        Rule(
            "has(self.microbatches) || !has(self.schedule)"
            f" || self.schedule in ['{ScheduleName.FROM_RANKS}', '{ScheduleName.STEPS}']",
            "microbatches must be set for a schedule by name",
            lambda p: p.microbatches is not None or not p.is_named or p.schedule is ScheduleName.STEPS,
        ),
        Rule(
            f"!has(self.schedule) || self.schedule != '{ScheduleName.STEPS}'"
            " || (self.stages == 1 && !has(self.microbatches))",
            f"stages must be 1 and microbatches must not be set for schedule {ScheduleName.STEPS}: a step is whole",
            lambda p: p.schedule is not ScheduleName.STEPS or (p.stages == 1 and p.microbatches is None),
        ),
        Rule(
            "self.stages * (has(self.dataParallel) ? self.dataParallel : 1)"
            f" * (has(self.tensorParallel) ? self.tensorParallel : 1) <= {MAX_PLACES}",
            f"stages, dataParallel and tensorParallel must multiply to at most {MAX_PLACES} GPUs",
            lambda p: p.places <= MAX_PLACES,
        ),
        Rule(
            "self.stages * (has(self.microbatches) ? self.microbatches : 1) * (has(self.chunks) ? self.chunks : 1)"
            f" <= {MAX_CELLS}",
            f"stages, microbatches and chunks must multiply to at most {MAX_CELLS}",
            lambda p: p.stages * (p.microbatches or 1) * (p.chunks or 1) <= MAX_CELLS,
        ),
    )

    @property
    def places(self) -> int:
        """Ranks of the job."""
        return self.stages * self.data_parallel * self.tensor_parallel

    @property
    def solved_microbatches(self) -> int:
        """Microbatches of the solver's schedule; 0 for a custom one, which contains them."""
        return 1 if self.schedule is ScheduleName.STEPS else self.microbatches or 0

    @property
    def is_named(self) -> bool:
        """Whether the solver knows the schedule; otherwise it is a custom schedule."""
        return self.schedule not in (None, ScheduleName.FROM_RANKS)

    @property
    def solver_name(self) -> str:
        """What ``perseus_solver.schedules`` calls the schedule."""
        return (self.schedule or ScheduleName.FROM_RANKS).solver_name


NO_PIPELINE: Final = Pipeline(schedule=ScheduleName.STEPS, stages=1, data_parallel=1, tensor_parallel=1)
"""Stands for a shape that is not known yet, or that a job without a plan does not need; nothing of it counts."""


def whole_iterations(ranks: int) -> Pipeline:
    """The shape of a job whose ranks fit no pipeline: one of one stage with all of them, and so one clock for all."""
    return Pipeline(schedule=ScheduleName.STEPS, stages=1, data_parallel=1, tensor_parallel=ranks)

"""One line for DeepSpeed's PipelineEngine: ``perseus_client.deepspeed.attach(engine)`` after ``deepspeed.initialize``.

Two attributes of the engine object are replaced: the map from instructions to functions, of which forward and backward
get marks around them, and ``_exec_schedule``, which begins and ends an iteration. Engines derived from it
(Megatron-DeepSpeed, GPT-NeoX) are followed alike. ``eval_batch`` is not recorded; sends, receives and reductions are
instructions of their own and lie outside of all marks. DeepSpeed is imported only inside ``attach``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from perseus_client.framework import (
    Attachment,
    Cell,
    RankWork,
    Unsupported,
    capturing,
    csv_of,
    require_names,
    require_version,
    schedule_of,
)
from perseus_client.graphs import capture
from perseus_core.rank import RankId

NAME: Final = "deepspeed"
OLDEST: Final = "0.16"
NEWEST_RUN: Final = "0.19"
_SCHEDULE: Final = "deepspeed.runtime.pipe.schedule"
_MARK: Final = "_perseus_attachment"


def attach(engine: Any, **options: Any) -> Attachment:
    """Follow an engine from its next ``train_batch`` on. A second call for the same engine returns the first
    attachment.

    Args:
        engine: the PipelineEngine that ``deepspeed.initialize`` returned. The rank id comes from its grid.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes all hooks. If this version of the framework cannot be followed, the reason
        is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    existing = getattr(engine, _MARK, None)
    if isinstance(existing, Attachment) and existing.active:
        return existing
    attachment = Attachment(NAME, options)

    def hook() -> None:
        require_version(NAME, importlib.import_module("deepspeed").__version__, OLDEST, NEWEST_RUN)
        schedule = importlib.import_module(_SCHEDULE)
        require_names(NAME, schedule, "TrainSchedule", "ForwardPass", "BackwardPass")
        if not hasattr(engine, "_INSTRUCTION_MAP"):
            raise Unsupported(f"{type(engine).__name__} is not a PipelineEngine: it runs no pipeline")
        require_names(NAME, engine, "_exec_schedule", "grid", "stage_id", "num_stages")
        attachment.replace(engine, _MARK, attachment)
        _Hooks(attachment, engine, schedule)

    return attachment.prepare(hook)


def schedule_csv(*, stages: int, microbatches: int) -> str:
    """The schedule of all stages as CSV, for ``perseus plan --order``. Needs no process group.

    Args:
        stages: number of stages of the pipeline.
        microbatches: gradient accumulation steps of one iteration.

    Returns:
        One line for each stage; see ``perseus_client.framework.csv_of``.
    """
    schedule = importlib.import_module(_SCHEDULE)
    return csv_of(
        _row(schedule, schedule.TrainSchedule(micro_batches=microbatches, stages=stages, stage_id=stage), stage)
        for stage in range(stages)
    )


def _row(schedule: Any, train: Any, stage: int) -> list[Cell]:
    """Forwards and backwards as the schedule yields them; each takes the microbatches in turn."""
    letters = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
    passes = [letters[type(command)] for commands in train.steps() for command in commands if type(command) in letters]
    numbers = {letter: count() for letter in letters.values()}
    return [Cell(stage, letter, next(numbers[letter])) for letter in passes]


class _Hooks:
    """The wrappers of one engine."""

    def __init__(self, attachment: Attachment, engine: Any, schedule: Any) -> None:
        self._attachment = attachment
        self._engine = engine
        self._schedule = schedule
        self._running = False
        self._done = {"forward": 0, "backward": 0}
        functions = dict(engine._INSTRUCTION_MAP)
        for instruction, kind in ((schedule.ForwardPass, "forward"), (schedule.BackwardPass, "backward")):
            functions[instruction] = self._wrap(functions[instruction], kind)
        attachment.replace(engine, "_INSTRUCTION_MAP", functions)
        self._hook_iteration()

    def _wrap(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """DeepSpeed binds what is in the map to the engine and names only a buffer: microbatches come in turn."""

        def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._running:
                return original(engine, *args, **kwargs)
            microbatch = self._done[kind]
            self._done[kind] = microbatch + 1
            session = self._attachment.session
            session.instruction_begin(kind, microbatch)
            try:
                return original(engine, *args, **kwargs)
            finally:
                session.instruction_end()

        return run

    def _hook_iteration(self) -> None:
        original = self._engine._exec_schedule

        def _exec_schedule(schedule: Any) -> Any:
            if not isinstance(schedule, self._schedule.TrainSchedule):
                return original(schedule)  # evaluation
            if not self._attachment.active:
                return original(schedule)
            captured = capturing()
            if not captured:
                self._attachment.follow(schedule.micro_batches, lambda: self._describe(schedule))
            self._done = {"forward": 0, "backward": 0}
            self._running = True
            try:
                if captured:
                    return capture(self._attachment, lambda: original(schedule))
                return original(schedule)
            finally:
                self._running = False
                if not captured:
                    self._attachment.session.step_end()

        self._attachment.replace(self._engine, "_exec_schedule", _exec_schedule)

    def _describe(self, train: Any) -> RankWork:
        """What this rank executes in an iteration of this schedule."""
        grid, stage = self._engine.grid, int(self._engine.stage_id)
        rank = RankId(int(grid.get_data_parallel_rank()), stage, int(grid.get_slice_parallel_rank()))
        return RankWork(rank, schedule_of(_row(self._schedule, train, stage)))

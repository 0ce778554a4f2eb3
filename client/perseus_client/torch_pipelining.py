"""One line for ``torch.distributed.pipelining``: ``perseus_client.torch_pipelining.attach(schedule)``.

Attributes of the schedule object and of its stage objects are wrapped; no class, module or file of torch is touched.
An instruction begins when its input is there (the runtime waits for receives before it calls the stage); a forward of
the last stage ends when the loss is computed. ``eval`` is not recorded. torch is imported only inside ``attach``.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from perseus_client.framework import (
    KINDS,
    Attachment,
    Cell,
    Schedule,
    Unsupported,
    capturing,
    csv_of,
    joined_of,
    one_f_one_b_row,
    replica_of,
    require_names,
    require_version,
    schedule_of,
)
from perseus_client.graphs import capture
from perseus_core.rank import RankId

NAME: Final = "torch.distributed.pipelining"
OLDEST: Final = "2.10"
"""The first in which every schedule of several stages runs on one runtime with custom functions."""
NEWEST_RUN: Final = "2.15"
_MARK: Final = "_perseus_attachment"
_STAGE_METHODS: Final = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_TENSOR_DIMENSIONS: Final = ("tp", "cp")
"""Dimensions of a DeviceMesh whose ranks share a stage's microbatch, fastest first."""


def attach(schedule: Any, *, dp: int | None = None, tp: int | None = None, **options: Any) -> Attachment:
    """Follow a schedule from its next ``step`` on. Call it once the schedule is built; a second call for the same
    schedule returns the first attachment.

    Args:
        schedule: any schedule of torch.distributed.pipelining; or one of its stages, whose schedule is then found
            when it first runs.
        dp: data-parallel rank; None: derived from the process groups.
        tp: rank among those that share the stage's work; None: derived from the mesh of its DTensor parameters.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes all hooks. If this version of the framework cannot be followed, the reason
        is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    existing = _attached(schedule)
    if existing is not None:
        return existing
    attachment = Attachment(NAME, options)

    def hook() -> None:
        torch = importlib.import_module("torch")
        require_version("torch", torch.__version__, OLDEST, NEWEST_RUN)
        if hasattr(schedule, "_n_microbatches"):
            _hook_schedule(attachment, schedule, dp, tp)
        else:
            _await_schedule(attachment, schedule, dp, tp)

    return attachment.prepare(hook)


def schedule_csv(schedule: Any) -> str:
    """The schedule of all ranks as CSV, for ``perseus plan --order``. Needs no agent.

    Raises:
        Unsupported: a schedule class whose order of instructions torch does not declare.
    """
    return csv_of(_rows(schedule))


def _attached(owner: Any) -> Attachment | None:
    attachment = getattr(owner, _MARK, None)
    return attachment if isinstance(attachment, Attachment) and attachment.active else None


def _stages(schedule: Any) -> list[Any]:
    stages: list[Any] = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return stages


def _rows(schedule: Any) -> list[list[Cell]]:
    """What each rank executes.

    Schedules of one stage are generated here: torch's own order of Schedule1F1B numbers the last rank's microbatches
    from 1 (torch 2.8 to 2.13), though it executes them from 0.
    """
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    microbatches = int(schedule._n_microbatches)
    declared = getattr(schedule, "pipeline_order_with_comms", None)
    if declared:
        return [_cells(declared[rank]) for rank in sorted(declared)]
    stages = int(schedule._num_stages)
    if type(schedule) is schedules.Schedule1F1B:
        return [one_f_one_b_row(stage, stages, microbatches) for stage in range(stages)]
    if type(schedule) is schedules.ScheduleGPipe:
        return [[Cell(stage, kind, k) for kind in "FB" for k in range(microbatches)] for stage in range(stages)]
    raise Unsupported(f"torch does not declare the order of {type(schedule).__name__}")


def _cells(actions: Sequence[Any]) -> list[Cell]:
    """The computations among a rank's actions; an overlapped forward and backward count as two of one action."""
    cells: list[Cell] = []
    for action in actions:
        # The text of an action is the same in all versions; the type of its parts is not.
        parts = [
            Cell(leaf.stage_index, letter, leaf.microbatch_index, joined=True)
            for leaf in ((action.sub_actions or (action,)) if action is not None else ())
            if (letter := str(leaf).strip("0123456789")) in KINDS
        ]
        cells += [*parts[:-1], *(part._replace(joined=False) for part in parts[-1:])]
    return cells


def _rank_id(schedule: Any, dp: int | None, tp: int | None) -> RankId:
    """The rank id by the process groups: of the stage, and of the mesh over which its parameters are split."""
    distributed = importlib.import_module("torch.distributed")
    stage = _stages(schedule)[0]
    pipeline_group = distributed.get_process_group_ranks(stage.group or distributed.group.WORLD)
    groups, rank, size = [pipeline_group], 0, 1
    for dimension, mesh in _tensor_meshes(stage):
        groups.append(distributed.get_process_group_ranks(mesh.get_group(dimension)))
        rank += size * mesh.get_local_rank(dimension)
        size *= len(groups[-1])
    if dp is None:
        dp = replica_of(distributed.get_rank(), groups)
    return RankId(dp, int(stage.group_rank), rank if tp is None else tp)


def _tensor_meshes(stage: Any) -> list[tuple[str, Any]]:
    for parameter in stage.submod.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        names = getattr(mesh, "mesh_dim_names", None) or ()
        meshes = [(name, mesh) for name in _TENSOR_DIMENSIONS if name in names]
        if meshes:
            return meshes
    return []


def _await_schedule(attachment: Attachment, stage: Any, dp: int | None, tp: int | None) -> None:
    """A stage does not know its schedule, but the schedule clears its stages at the begin of a step."""
    require_names(NAME, stage, "clear_runtime_states")
    original = stage.clear_runtime_states
    hooked = False

    def clear_runtime_states() -> None:
        nonlocal hooked
        schedule = None if hooked else sys._getframe(1).f_locals.get("self")
        if schedule is not None and attachment.active:
            hooked = True
            if _attached(schedule) is None:
                attachment.prepare(lambda: _hook_schedule(attachment, schedule, dp, tp))
        original()

    attachment.replace(stage, _MARK, attachment)
    attachment.replace(stage, "clear_runtime_states", clear_runtime_states)


def _hook_schedule(attachment: Attachment, schedule: Any, dp: int | None, tp: int | None) -> None:
    require_names(NAME, schedule, "_n_microbatches", "step", "_has_backward", "_loss_fn", "_maybe_compute_loss")
    stages = _stages(schedule)
    for stage in stages:
        require_names(NAME, stage, *_STAGE_METHODS, "stage_index", "group_rank", "is_last")
    rank = _rank_id(schedule, dp, tp)
    row = _rows(schedule)[rank.stage]
    attachment.connect(rank, schedule_of(row), joined_of(row))
    attachment.replace(schedule, _MARK, attachment)
    _Hooks(attachment, schedule, stages)


class _Hooks:
    """The wrappers of one schedule and its stages."""

    def __init__(self, attachment: Attachment, schedule: Any, stages: Sequence[Any]) -> None:
        self._attachment = attachment
        self._session = attachment.session
        self._schedule = schedule
        self._chunks = {index: chunk for chunk, index in enumerate(sorted(stage.stage_index for stage in stages))}
        self._action: _CustomAction | None = None
        for stage in stages:
            self._hook_stage(stage, self._chunks[stage.stage_index])
        self._hook_loss()
        self._hook_custom_functions()
        self._hook_step()

    # The session's marks: outside of steps, without an agent and after detach() they do nothing.

    def _begin(self, kind: str, microbatch: int, chunk: int) -> None:
        if self._action is None:
            self._session.instruction_begin(kind, microbatch, chunk)
        else:
            self._action.begin()

    def _end(self) -> None:
        if self._action is None:
            self._session.instruction_end()

    def _hook_stage(self, stage: Any, chunk: int) -> None:
        begin, end = self._begin, self._end
        forward, backward, weight = (getattr(stage, name) for name in _STAGE_METHODS)
        awaits_loss = bool(stage.is_last and self._schedule._loss_fn is not None)

        def forward_one_chunk(*args: Any, **kwargs: Any) -> Any:
            microbatch = args[0] if args else kwargs.get("fwd_chunk_id", -1)
            begin("forward", microbatch, chunk)
            computed = False
            try:
                output = forward(*args, **kwargs)
                computed = True
                return output
            finally:
                if not (computed and awaits_loss):
                    end()

        def backward_one_chunk(*args: Any, **kwargs: Any) -> Any:
            microbatch = args[0] if args else kwargs.get("bwd_chunk_id", -1)
            kind = "backward" if kwargs.get("full_backward", args[2] if len(args) > 2 else True) else "input_gradient"
            begin(kind, microbatch, chunk)
            try:
                return backward(*args, **kwargs)
            finally:
                end()

        def backward_weight_one_chunk(*args: Any, **kwargs: Any) -> Any:
            microbatch = args[0] if args else kwargs.get("bwd_chunk_id", -1)
            begin("weight_gradient", microbatch, chunk)
            try:
                return weight(*args, **kwargs)
            finally:
                end()

        for wrapper in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk):
            self._attachment.replace(stage, wrapper.__name__, wrapper)

    def _hook_loss(self) -> None:
        """The loss, often the vocabulary's projection, belongs to the last stage's forward."""
        schedule, end = self._schedule, self._end
        original = schedule._maybe_compute_loss

        def _maybe_compute_loss(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                stage = args[0] if args else kwargs.get("stage")
                if stage is not None and stage.is_last and schedule._loss_fn is not None:
                    end()

        self._attachment.replace(schedule, "_maybe_compute_loss", _maybe_compute_loss)

    def _hook_step(self) -> None:
        schedule, session = self._schedule, self._session
        original = schedule.step

        def step(*args: Any, **kwargs: Any) -> Any:
            # eval(), or no loss: it walks the same order, but computes no gradient
            if not schedule._has_backward or not self._attachment.active:
                return original(*args, **kwargs)
            if capturing():
                return capture(self._attachment, functools.partial(original, *args, **kwargs))
            session.step_begin()
            try:
                return original(*args, **kwargs)
            finally:
                session.step_end()

        self._attachment.replace(schedule, "step", step)

    def _hook_custom_functions(self) -> None:
        """Functions that replace whole actions, such as one that overlaps a forward with a backward."""
        functions: dict[Any, Callable[..., Any]] | None = getattr(self._schedule, "_comp_type_to_function_map", None)
        if functions is None:
            return
        register = self._schedule.register_custom_function

        def register_custom_function(computation_type: Any, custom_function: Callable[..., Any]) -> None:
            register(computation_type, self._wrap_custom(custom_function))

        for computation_type, function in list(functions.items()):
            functions[computation_type] = self._wrap_custom(function)

        def undo() -> None:
            for computation_type, function in list(functions.items()):
                functions[computation_type] = getattr(function, "_perseus_original", function)

        self._attachment.on_detach(undo)
        self._attachment.replace(self._schedule, "register_custom_function", register_custom_function)

    def _wrap_custom(self, function: Callable[..., Any]) -> Callable[..., Any]:
        waits_inside = True  # it calls the stages itself, after its receives; until a run shows otherwise

        def custom_function(action: Any, context: Any) -> Any:
            nonlocal waits_inside
            row = _cells([action])
            if not row or not self._attachment.active:
                return function(action, context)
            actions: Schedule = [
                (KINDS[letter], mb, self._chunks[index]) for index, letter, mb, _ in row if index in self._chunks
            ]
            running = self._action = _CustomAction(self._session, actions)
            if not waits_inside:
                running.begin()
            try:
                return function(action, context)
            finally:
                waits_inside = running.begun and waits_inside
                self._action = None
                running.end()

        custom_function._perseus_original = function  # type: ignore[attr-defined]
        return custom_function


class _CustomAction:
    """The marks of one action that a custom function runs, perhaps on two threads: all its instructions at once.

    The schedule names them, not what happened to overlap. They begin at the first call of a stage inside, so that
    receives which the function waits for stay outside.
    """

    def __init__(self, session: Any, instructions: Schedule) -> None:
        self.begun = False
        self._session = session
        self._instructions = instructions
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self.begun:
                return
            self.begun = True
            for instruction in self._instructions:
                self._session.instruction_begin(*instruction)

    def end(self) -> None:
        self.begin()
        for instruction in self._instructions:
            self._session.instruction_end(*instruction)

"""One line for Megatron-Core: ``perseus_client.megatron.attach()`` before ``pretrain(...)``.

Five functions of ``megatron.core.pipeline_parallel.schedules`` are rebound in that module, where Megatron looks them
up: the three that run an iteration, and those that run a microbatch forward and backward. So is the one of
``combined_1f1b`` that overlaps the forward of one microbatch with the backward of another: the two are one action. No
file of Megatron is touched. Iterations without backward (evaluation) are not recorded; communication between stages is
outside of all marks; a backward contains its recomputation. Megatron is imported only inside ``attach``.

An iteration that Megatron captures into one CUDA graph is followed through its replays (``perseus_client.graphs``).
Where its order cannot be known, the whole iteration is marked as a step, as in loops without a pipeline: all ranks then
hold one clock.

Megatron-LM may benchmark all ranks between iterations (``--gpu-sniff-test-interval``) and names those that are slower
than the others. That runs at default clocks, so that a stage with a low planned clock is not taken for a sick GPU.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from perseus_client.framework import (
    STEP,
    Attachment,
    Cell,
    RankWork,
    Schedule,
    capturing,
    csv_of,
    joined_of,
    log,
    one_f_one_b_row,
    require_names,
    require_version,
    schedule_of,
)
from perseus_client.graphs import capture
from perseus_client.launchers import whole_iterations
from perseus_core.rank import RankId

NAME: Final = "megatron-core"
OLDEST: Final = "0.12"
"""The first with ``get_schedule_table``."""
NEWEST_RUN: Final = "0.19"
_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
_ITERATIONS: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_COMBINED: Final = "megatron.core.pipeline_parallel.combined_1f1b"
_COMBINED_STEP: Final = "combined_forward_backward_step"
_RANK_CHECK: Final = "megatron.training.gpu_sniff_test"
_RANK_CHECK_FUNCTION: Final = "run_sniff_tests"
SETTLE_S: Final = 0.1
"""In which a GPU is at its default clocks: 99 of 100 changes on a Hopper, the slowest that is published."""
_TAG: Final = "_perseus_tag"
_attachment: Attachment | None = None


def attach(**options: Any) -> Attachment:
    """Follow every training iteration of this process from now on. A second call returns the first attachment.

    Call it before ``pretrain``, which looks up the iteration's function once when it begins. The rank id comes from
    Megatron's process groups; tensor-parallel and context-parallel ranks share a stage, so both count into ``tp``.

    Args:
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes all hooks. If this version of the framework cannot be followed, the reason
        is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    global _attachment  # noqa: PLW0603 - there is one module to hook
    if _attachment is not None and _attachment.active:
        return _attachment
    attachment = _attachment = Attachment(NAME, options)

    def hook() -> None:
        require_version(NAME, importlib.import_module("megatron.core").__version__, OLDEST, NEWEST_RUN)
        schedules = importlib.import_module(_SCHEDULES)
        require_names(NAME, schedules, *_ITERATIONS, "forward_step", "backward_step", "get_schedule_table")
        hooks = _Hooks(attachment, schedules)
        hooks.hook_combined(_module(_COMBINED))
        hook_rank_check(attachment)

    return attachment.prepare(hook)


def _module(name: str) -> Any:
    """A module that not every version has, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def hook_rank_check(attachment: Attachment) -> None:
    """Run Megatron-LM's benchmark of all ranks at default clocks; nothing happens where this version has none.

    ``megatron.training`` is not imported for it: programs that train with Megatron-Core alone do not have it.
    """
    if "megatron.training" not in sys.modules:
        return
    try:
        module = importlib.import_module(_RANK_CHECK)
        original = getattr(module, _RANK_CHECK_FUNCTION)
    except (ImportError, AttributeError):
        return

    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> Any:
        session = attachment.session
        if not attachment.active or not session.connected:
            return original(*args, **kwargs)
        with session.default_clocks():
            time.sleep(SETTLE_S)
            return original(*args, **kwargs)

    attachment.replace(module, _RANK_CHECK_FUNCTION, check)


def schedule_csv(
    *, stages: int, microbatches: int, chunks: int = 1, group: int | None = None, overlap: bool = False
) -> str:
    """The schedule of all stages as CSV, for ``perseus plan --order``. Needs no process group.

    Args:
        stages: pipeline-parallel size.
        microbatches: of one iteration of one pipeline.
        chunks: virtual pipeline size; 1: without interleaving.
        group: ``microbatch_group_size_per_vp_stage``; None: as many as there are stages.
        overlap: ``overlap_moe_expert_parallel_comm``.

    Returns:
        One line for each stage; see ``perseus_client.framework.csv_of``.
    """
    shape = _Shape(stages, microbatches, chunks, group or stages, overlap)
    schedules = importlib.import_module(_SCHEDULES)
    return csv_of(_row(schedules, stage, shape) for stage in range(stages))


class _Shape(NamedTuple):
    """What the order of an iteration's instructions depends on; see ``schedule_csv``."""

    stages: int
    microbatches: int
    chunks: int
    group: int
    overlap: bool


def _row(schedules: Any, stage: int, shape: _Shape) -> list[Cell]:
    stages, microbatches, chunks, group, overlap = shape
    if chunks == 1 and not (overlap and stages == 1):  # with stages, Megatron overlaps chunks alone
        return one_f_one_b_row(stage, stages, microbatches)
    table = schedules.get_schedule_table(microbatches, chunks, group)
    forward = [Cell(chunk * stages + stage, "F", microbatch) for microbatch, chunk in table]
    backward = [Cell((chunks - 1 - chunk) * stages + stage, "B", microbatch) for microbatch, chunk in table]
    warm = min(2 * (stages - stage - 1) + (chunks - 1) * group + overlap, len(table))
    row = forward[:warm]
    for k in range(len(table) - warm):
        row += [forward[warm + k]._replace(joined=overlap), backward[k]]
    return row + backward[len(table) - warm :]


def whole_because(config: Any, groups: Any) -> str:
    """Why an iteration is marked as a whole; empty: each of its instructions is.

    Args:
        config: of the model, as Megatron's ``get_model_config`` returns it.
        groups: the process groups given to the iteration, or None.
    """
    if getattr(config, "hybrid_context_parallel", False):
        return "with hybrid_context_parallel the order of microbatches follows from their lengths"
    if "MultiModule" in type(groups).__name__:
        return "pipelines of several modules have stages of their own for each module"
    return ""


class _Hooks:
    """The rebound functions."""

    def __init__(self, attachment: Attachment, schedules: Any) -> None:
        self._attachment = attachment
        self._schedules = schedules
        self._running = False
        self._seen = False
        """Whether an iteration has run through these hooks, or it was logged that none does."""
        self._forwards: Counter[int] = Counter()
        for name in _ITERATIONS:
            attachment.replace(schedules, name, self._wrap_iteration(getattr(schedules, name)))
        attachment.replace(schedules, "forward_step", self._wrap_forward(schedules.forward_step))
        attachment.replace(schedules, "backward_step", self._wrap_backward(schedules.backward_step))

    def hook_combined(self, module: Any) -> None:
        """Mark forwards and backwards that overlap; ``module``: None where this version has none."""
        if module is not None:
            require_names(NAME, module, _COMBINED_STEP)
            self._attachment.replace(module, _COMBINED_STEP, self._wrap_combined(getattr(module, _COMBINED_STEP)))

    def _wrap_iteration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iteration(*args: Any, **kwargs: Any) -> Any:
            if self._running or kwargs.get("forward_only") or not self._attachment.active:
                return original(*args, **kwargs)
            if capturing():
                return self._capture(functools.partial(original, *args, **kwargs))
            microbatches, model = kwargs.get("num_microbatches"), kwargs.get("model")
            groups = kwargs.get("pg_collection")
            self._attachment.follow(microbatches, lambda: self._describe(microbatches, model, groups))
            session = self._attachment.session
            self._running = self._seen = True
            self._forwards.clear()
            if self._attachment.whole:
                session.instruction_begin(*STEP)
            try:
                return original(*args, **kwargs)
            finally:
                self._running = False
                if self._attachment.whole:
                    session.instruction_end()
                session.step_end()

        return iteration

    def _capture(self, iteration: Callable[[], Any]) -> Any:
        self._running = self._seen = True
        self._forwards.clear()
        try:
            return capture(self._attachment, iteration)
        finally:
            self._running = False

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not self._running or self._attachment.whole:  # evaluation
                return original(*args, **kwargs)
            chunk = self._chunk(kwargs)
            microbatch = kwargs.get("current_microbatch")
            if microbatch is None:
                microbatch = self._forwards[chunk]
            self._forwards[chunk] += 1
            session = self._attachment.session
            session.instruction_begin("forward", microbatch, chunk)
            try:
                result = original(*args, **kwargs)
            finally:
                session.instruction_end()
            _tag(result, (microbatch, chunk))
            return result

        return forward_step

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                self._missed()
            if not self._running or self._attachment.whole:
                return original(*args, **kwargs)
            microbatch, chunk = _tag_of(args[1] if len(args) > 1 else kwargs.get("output_tensor"))
            session = self._attachment.session
            session.instruction_begin("backward", microbatch, chunk)
            try:
                return original(*args, **kwargs)
            finally:
                session.instruction_end()

        return backward_step

    def _wrap_combined(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
            if not self._running or self._attachment.whole:
                return original(*args, **kwargs)
            passed = signature.bind(*args, **kwargs).arguments
            forward = int(passed.get("current_microbatch") or 0), int(passed.get("f_model_chunk_id") or 0)
            action: Schedule = []
            if passed.get("f_model") is not None:
                action.append(("forward", *forward))
            if passed.get("b_model") is not None:
                action.append(("backward", *_tag_of(passed.get("b_output_tensor"))))
            session = self._attachment.session
            for instruction in action:
                session.instruction_begin(*instruction)
            try:
                result = original(*args, **kwargs)
            finally:
                for instruction in action:
                    session.instruction_end(*instruction)
            _tag(result, forward)
            return result

        return combined_forward_backward_step

    def _missed(self) -> None:
        """A backward runs outside of every iteration. Evaluation has none, so training calls another iteration
        function."""
        if not self._seen and self._attachment.active:
            self._seen = True
            log.warning(
                "perseus_client: %s: attached too late: training looked up its iteration's function before, so this "
                "rank trains at default clocks. Call perseus_client.megatron.attach() before pretrain(), and before "
                "any get_forward_backward_func()",
                NAME,
            )

    def _chunk(self, kwargs: dict[str, Any]) -> int:
        chunk = kwargs.get("vp_stage")
        if chunk is None:  # core before 0.13 keeps it in a global; without interleaving there is none
            rank = getattr(self._schedules.parallel_state, "get_virtual_pipeline_model_parallel_rank", None)
            chunk = rank() if rank is not None else None
        return int(chunk or 0)

    def _describe(self, microbatches: Any, model: Any, groups: Any) -> RankWork:
        """What this rank executes in an iteration of so many microbatches."""
        chunks = len(model) if isinstance(model, list) else 1
        config = self._schedules.get_model_config(model[0] if isinstance(model, list) else model)
        why = whole_because(config, groups)
        self._attachment.whole = False
        if why:
            self._attachment.mark_whole(why)
            return whole_iterations()
        rank, stages = _rank_id(self._schedules.parallel_state, groups)
        group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
        overlap = bool(getattr(config, "overlap_moe_expert_parallel_comm", False))
        row = _row(self._schedules, rank.stage, _Shape(stages, int(microbatches), chunks, group, overlap))
        return RankWork(rank, schedule_of(row), joined_of(row))


def _tag(result: Any, name: tuple[int, int]) -> None:
    """Tag the output of a forward: its backward gets the very same object, and no other hint of what it is."""
    output = result[0] if isinstance(result, tuple) else result
    for tensor in output if isinstance(output, list) else [output]:
        if hasattr(tensor, "requires_grad"):
            setattr(tensor, _TAG, name)


def _tag_of(output: Any) -> tuple[int, int]:
    """The tag of what a backward gets; one that no forward has is no instruction of the schedule."""
    while isinstance(output, list | tuple) and output:
        output = output[0]
    tag: tuple[int, int] = getattr(output, _TAG, (-1, 0))
    return tag


def _rank_id(state: Any, groups: Any) -> tuple[RankId, int]:
    """The rank id and the number of stages: from the groups given to the iteration, else from the global ones."""

    def of(name: str) -> tuple[int, int]:
        group = getattr(groups, name, None)
        if group is not None:
            return int(group.rank()), int(group.size())
        long = {"pp": "pipeline_model", "tp": "tensor_model", "cp": "context", "dp": "data"}[name]
        rank, size = (getattr(state, f"get_{long}_parallel_{what}") for what in ("rank", "world_size"))
        return int(rank()), int(size())

    (stage, stages), (tp, tps), (context, _), (dp, _) = of("pp"), of("tp"), of("cp"), of("dp")
    return RankId(dp, stage, tp + tps * context), stages

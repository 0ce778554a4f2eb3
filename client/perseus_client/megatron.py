"""One line for Megatron-Core: ``perseus_client.megatron.attach()`` before ``pretrain(...)``.

Five functions of ``megatron.core.pipeline_parallel.schedules`` are rebound in that module, where Megatron looks them
up: the three that run an iteration, and those that run a microbatch forward and backward. No file of Megatron is
touched. Iterations without backward (evaluation) are not recorded; communication between stages is outside of all
marks; a backward contains its recomputation. Megatron is imported only inside ``attach``.

Megatron-LM may benchmark all ranks between iterations (``--gpu-sniff-test-interval``) and names those that are slower
than the others. That runs at default clocks, so that a stage with a low planned clock is not taken for a sick GPU.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from perseus_client.framework import (
    Attachment,
    Cell,
    Schedule,
    Unsupported,
    csv_of,
    log,
    one_f_one_b_row,
    require_names,
    require_version,
    schedule_of,
)
from perseus_core.rank import RankId

NAME: Final = "megatron-core"
OLDEST: Final = "0.12"
"""The first with ``get_schedule_table``."""
NEWEST_RUN: Final = "0.16"
_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
_ITERATIONS: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
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
        _Hooks(attachment, schedules)
        hook_rank_check(attachment)

    return attachment.prepare(hook)


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


def schedule_csv(*, stages: int, microbatches: int, chunks: int = 1, group: int | None = None) -> str:
    """The schedule of all stages as CSV, for ``perseus plan --order``. Needs no process group.

    Args:
        stages: pipeline-parallel size.
        microbatches: of one iteration of one pipeline.
        chunks: virtual pipeline size; 1: without interleaving.
        group: ``microbatch_group_size_per_vp_stage``; None: as many as there are stages.

    Returns:
        One line for each stage; see ``perseus_client.framework.csv_of``.
    """
    shape = {"stages": stages, "microbatches": microbatches, "chunks": chunks, "group": group or stages}
    schedules = importlib.import_module(_SCHEDULES)
    return csv_of(_row(schedules, stage, **shape) for stage in range(stages))


def _row(schedules: Any, stage: int, *, stages: int, microbatches: int, chunks: int, group: int) -> list[Cell]:
    if chunks == 1:
        return one_f_one_b_row(stage, stages, microbatches)
    table = schedules.get_schedule_table(microbatches, chunks, group)
    forward = [Cell(chunk * stages + stage, "F", microbatch) for microbatch, chunk in table]
    backward = [Cell((chunks - 1 - chunk) * stages + stage, "B", microbatch) for microbatch, chunk in table]
    warm = min(2 * (stages - stage - 1) + (chunks - 1) * group, len(table))
    row = forward[:warm]
    for k in range(len(table) - warm):
        row += [forward[warm + k], backward[k]]
    return row + backward[len(table) - warm :]


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

    def _wrap_iteration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iteration(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only") or self._attachment.refuse_graph() or not self._attachment.active:
                return original(*args, **kwargs)
            microbatches, model = kwargs.get("num_microbatches"), kwargs.get("model")
            groups = kwargs.get("pg_collection")
            self._attachment.follow(microbatches, lambda: self._describe(microbatches, model, groups))
            self._running = self._seen = True
            self._forwards.clear()
            try:
                return original(*args, **kwargs)
            finally:
                self._running = False
                self._attachment.session.step_end()

        return iteration

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not self._running:  # evaluation
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
                return original(*args, **kwargs)
            output = args[1] if len(args) > 1 else kwargs.get("output_tensor")
            while isinstance(output, list | tuple) and output:
                output = output[0]
            microbatch, chunk = getattr(output, _TAG, (-1, 0))
            session = self._attachment.session
            session.instruction_begin("backward", microbatch, chunk)
            try:
                return original(*args, **kwargs)
            finally:
                session.instruction_end()

        return backward_step

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

    def _describe(self, microbatches: Any, model: Any, groups: Any) -> tuple[RankId, Schedule]:
        """What this rank executes in an iteration of so many microbatches.

        Raises:
            Unsupported: a variant that bypasses the functions that are hooked.
        """
        chunks = len(model) if isinstance(model, list) else 1
        config = self._schedules.get_model_config(model[0] if isinstance(model, list) else model)
        for flag in ("overlap_moe_expert_parallel_comm", "hybrid_context_parallel"):
            if getattr(config, flag, False):
                raise Unsupported(f"{flag} runs forwards and backwards in one another")
        if _full_iteration_graph(config):
            raise Unsupported("cuda_graph_scope full_iteration replays iterations, in which no Python runs")
        if "MultiModule" in type(groups).__name__:
            raise Unsupported("pipelines of several modules have stages of their own for each module")
        rank, stages = _rank_id(self._schedules.parallel_state, groups)
        group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
        shape = {"stages": stages, "microbatches": int(microbatches), "chunks": chunks, "group": group}
        return rank, schedule_of(_row(self._schedules, rank.stage, **shape))


def _full_iteration_graph(config: Any) -> bool:
    """Whether training replays whole iterations; in some versions the scope is a list, of enums or of strings."""
    implementation, scope = getattr(config, "cuda_graph_impl", None), getattr(config, "cuda_graph_scope", None)
    on = implementation not in (None, "none") or getattr(config, "enable_cuda_graph", False)
    names = [getattr(one, "name", one) for one in (scope if isinstance(scope, list | tuple) else [scope])]
    return bool(on and "full_iteration" in (implementation, *names))


def _tag(result: Any, name: tuple[int, int]) -> None:
    """Tag the output of a forward: its backward gets the very same object, and no other hint of what it is."""
    output = result[0] if isinstance(result, tuple) else result
    for tensor in output if isinstance(output, list) else [output]:
        if hasattr(tensor, "requires_grad"):
            setattr(tensor, _TAG, name)


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

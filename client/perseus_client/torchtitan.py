"""One line for torchtitan: ``perseus_client.torchtitan.attach(trainer)`` before ``trainer.train()``.

* No pipeline stages: whole steps. The trainer's ``train_step`` is wrapped: one call is one step of the optimizer, over
  all microbatches that it accumulates. Validation and checkpoints lie outside. A graph of the passes lies inside.
* Pipeline stages: every instruction, as ``perseus_client.torch_pipelining`` marks them; also where torchtitan captures
  the forward and backward passes of all microbatches into one CUDA graph, as it does by default since September 2026
  where a rank has one stage (``perseus_client.graphs``).
* Pipeline stages whose schedule cannot be followed: whole steps.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, Final

from perseus_client import torch_pipelining
from perseus_client.framework import Attachment, log, require_names, require_version
from perseus_client.loops import Steps

NAME: Final = "torchtitan"
OLDEST: Final = "0.2"
NEWEST_RUN: Final = "0.3"


def attach(trainer: Any, **options: Any) -> Attachment:
    """Follow a Trainer from its next ``train`` on.

    Args:
        trainer: the Trainer, as its configuration builds it.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes the wrappers. If this version of the framework cannot be followed, the
        reason is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    attachment = Steps(NAME, options)

    def hook() -> None:
        require_version(NAME, importlib.metadata.version(NAME), OLDEST, NEWEST_RUN)
        require_names(NAME, trainer, "train_step", "close")
        engine = getattr(trainer, "engine", trainer)  # which newer trainers have apart from their loop
        require_names(NAME, engine, "parallel_dims")
        pipeline = _follow_pipeline(engine, options) if engine.parallel_dims.pp_enabled else Attachment(NAME, {})
        if pipeline.active:
            attachment.session = pipeline.session
            attachment.on_detach(pipeline.detach)
        train_step, close = trainer.train_step, trainer.close

        @functools.wraps(train_step)
        def followed_step(*args: Any, **kwargs: Any) -> Any:
            if pipeline.active:
                return train_step(*args, **kwargs)
            attachment.begin()
            result = train_step(*args, **kwargs)  # a step that is cancelled stays open, and is not used
            attachment.end()
            return result

        @functools.wraps(close)
        def followed_close(*args: Any, **kwargs: Any) -> Any:
            pipeline.pause()
            attachment.pause()
            return close(*args, **kwargs)

        attachment.replace(trainer, "train_step", followed_step)
        attachment.replace(trainer, "close", followed_close)

    return attachment.prepare(hook)


def _follow_pipeline(engine: Any, options: dict[str, Any]) -> Attachment:
    """Mark each instruction of the schedule; inactive where it cannot be followed."""
    require_names(NAME, engine, "pp_schedule")
    pipeline = torch_pipelining.attach(engine.pp_schedule, **options)
    if not pipeline.active:
        log.info("perseus_client: %s: whole steps are marked instead of instructions", NAME)
    return pipeline

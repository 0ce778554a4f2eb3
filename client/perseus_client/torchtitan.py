"""One line for torchtitan: ``perseus_client.torchtitan.attach(trainer)`` before ``trainer.train()``.

The trainer's ``train_step`` is wrapped: one call is one step of the optimizer, over all microbatches that it
accumulates. Validation and checkpoints lie outside. Its models are sharded and communicate within their passes, so a
step is one whole. With pipeline stages, attach ``perseus_client.torch_pipelining`` to ``trainer.pp_schedule`` instead.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, Final

from perseus_client.framework import Attachment, Unsupported, require_names, require_version
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
        An attachment; its ``detach`` removes the wrappers. If this version of the framework cannot be followed, or the
        trainer has pipeline stages, the reason is logged as an error and the attachment is inactive. Never raises;
        without an agent nothing is touched.
    """
    attachment = Steps(NAME, options)

    def hook() -> None:
        require_version(NAME, importlib.metadata.version(NAME), OLDEST, NEWEST_RUN)
        require_names(NAME, trainer, "train_step", "close", "parallel_dims")
        if trainer.parallel_dims.pp_enabled:
            raise Unsupported("it has pipeline stages: attach perseus_client.torch_pipelining to trainer.pp_schedule")
        train_step, close = trainer.train_step, trainer.close

        @functools.wraps(train_step)
        def followed_step(*args: Any, **kwargs: Any) -> Any:
            attachment.begin()
            result = train_step(*args, **kwargs)  # a step that is cancelled stays open, and is not used
            attachment.end()
            return result

        @functools.wraps(close)
        def followed_close(*args: Any, **kwargs: Any) -> Any:
            attachment.pause()
            return close(*args, **kwargs)

        attachment.replace(trainer, "train_step", followed_step)
        attachment.replace(trainer, "close", followed_close)

    return attachment.prepare(hook)

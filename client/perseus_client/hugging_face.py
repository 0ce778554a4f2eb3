"""One line for Hugging Face's Trainer: ``perseus_client.hugging_face.attach(trainer)`` before ``trainer.train()``.

The trainer gets a callback. An iteration is a step of its optimizer; evaluation and saving lie outside.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from perseus_client.framework import Attachment, require_names, require_version
from perseus_client.loops import Steps

NAME: Final = "transformers"
OLDEST: Final = "5.0"
NEWEST_RUN: Final = "5.24"


def attach(trainer: Any, **options: Any) -> Attachment:
    """Follow a Trainer from its next ``train`` on.

    Args:
        trainer: the Trainer; derived classes are followed alike.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes the callback. If this version of the framework cannot be followed, the
        reason is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    attachment = Steps(NAME, options)

    def hook() -> None:
        transformers = importlib.import_module(NAME)
        require_version(NAME, transformers.__version__, OLDEST, NEWEST_RUN)
        require_names(NAME, trainer, "add_callback", "remove_callback")

        def backward_ended() -> None:
            attachment.is_last = trainer.accelerator.sync_gradients
            attachment.backward_ended()

        class PerseusCallback(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                attachment.watch(trainer.model_wrapped, backward_ended)

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                attachment.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                attachment.end()

            def on_train_end(self, *_: Any, **__: Any) -> None:
                attachment.pause()

        callback = PerseusCallback()
        trainer.add_callback(callback)
        attachment.on_detach(lambda: trainer.remove_callback(callback))

    return attachment.prepare(hook)

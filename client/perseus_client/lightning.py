"""One line for Lightning's Trainer: ``perseus_client.lightning.attach(trainer)`` before ``trainer.fit(…)``.

The trainer gets a callback. An iteration is a step of the optimizer: as many batches as the trainer accumulates, and
what is left over at the end of an epoch. Validation lies outside. NeMo's trainers are Lightning's.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any, Final

from perseus_client.framework import Attachment, require_names, require_version
from perseus_client.loops import Steps
from perseus_client.own_time import on_backward_end

NAME: Final = "lightning"
OLDEST: Final = "2.4"
NEWEST_RUN: Final = "2.6"


def attach(trainer: Any, **options: Any) -> Attachment:
    """Follow a Trainer from its next ``fit`` on.

    Args:
        trainer: the Trainer, of the package ``lightning`` or of ``pytorch_lightning``.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes the callback. If this version of the framework cannot be followed, the
        reason is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    attachment = Steps(NAME, options)

    def hook() -> None:
        package = type(trainer).__module__.partition(".")[0]
        pytorch = importlib.import_module("lightning.pytorch" if package == NAME else package)
        require_version(NAME, importlib.import_module(package).__version__, OLDEST, NEWEST_RUN)
        require_names(NAME, trainer, "callbacks", "accumulate_grad_batches", "is_last_batch")

        class PerseusCallback(pytorch.Callback):  # type: ignore[misc, name-defined]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                attachment.watch(getattr(trainer.strategy, "model", None) or module, None)

            def on_before_backward(self, _trainer: Any, _module: Any, loss: Any) -> None:
                on_backward_end(loss, attachment.backward_ended)

            def on_train_batch_start(self, trainer: Any, _module: Any, _batch: Any, number: int) -> None:
                if number % trainer.accumulate_grad_batches == 0:
                    attachment.begin()
                attachment.is_last = (number + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch

            def on_train_batch_end(self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, number: int) -> None:
                if (number + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
                    attachment.end()

            def on_train_end(self, *_: Any) -> None:
                attachment.pause()

        callback = PerseusCallback()
        trainer.callbacks.append(callback)

        def remove() -> None:
            with suppress(ValueError):  # somebody else has removed it
                trainer.callbacks.remove(callback)

        attachment.on_detach(remove)

    return attachment.prepare(hook)

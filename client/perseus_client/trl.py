"""One line for TRL's trainers that generate: ``perseus_client.trl.attach(trainer)`` before ``trainer.train()``.

An iteration has three phases: *rollout* generates completions, *reward* scores them (and computes the log probabilities
that training compares with), *training* makes all steps of the optimizer with them. Evaluation is not recorded. TRL
names both functions that are wrapped with an underscore; they are alike in GRPOTrainer and RLOOTrainer.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

from perseus_client.framework import Attachment, require_names, require_version
from perseus_client.phases import Phases

NAME: Final = "trl"
OLDEST: Final = "1.0"
NEWEST_RUN: Final = "1.16"
PHASES: Final = ("rollout", "reward", "training")


def attach(trainer: Any, **options: Any) -> Attachment:
    """Follow a GRPOTrainer or RLOOTrainer from its next ``train`` on.

    Args:
        trainer: the trainer; derived classes are followed alike.
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        An attachment; its ``detach`` removes the wrappers. If this version of the framework cannot be followed, the
        reason is logged as an error and the attachment is inactive. Never raises; without an agent nothing is touched.
    """
    phases = Phases(*PHASES, framework=NAME, **options)
    rollout, reward, training = PHASES

    def hook() -> None:
        require_version(NAME, importlib.import_module(NAME).__version__, OLDEST, NEWEST_RUN)
        require_names(NAME, trainer, "_generate", "_generate_and_score_completions", "_step", "num_iterations", "args")
        require_names(NAME, trainer.args, "steps_per_generation")
        generate, score = trainer._generate, trainer._generate_and_score_completions
        generating = False

        @functools.wraps(score)
        def followed_score(*args: Any, **kwargs: Any) -> Any:
            nonlocal generating
            if not trainer.model.training:
                return score(*args, **kwargs)
            phases.begin(rollout)
            generating = True
            try:
                return score(*args, **kwargs)
            finally:
                generating = False
                phases.begin(training)

        @functools.wraps(generate)
        def followed_generate(*args: Any, **kwargs: Any) -> Any:
            nonlocal generating
            try:
                return generate(*args, **kwargs)
            finally:
                if generating:
                    generating = False
                    phases.begin(reward)

        class PerseusCallback(importlib.import_module("transformers").TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0:
                    phases.end(training)  # before an evaluation

            def on_train_end(self, *_: Any, **__: Any) -> None:
                phases.pause()

        callback = PerseusCallback()
        trainer.add_callback(callback)
        phases.on_detach(lambda: trainer.remove_callback(callback))
        phases.replace(trainer, "_generate_and_score_completions", followed_score)
        phases.replace(trainer, "_generate", followed_generate)

    return phases.prepare(hook)

"""verl's hybrid workers, by one setting: ``actor_rollout_ref.model.external_lib=perseus_client.verl``.

verl imports that module in the process of each worker, and importing it is all. An iteration has two phases: *rollout*,
from the update of the engine's weights on, in which the engine generates on the worker's GPU and rewards are computed,
and *training*, from the first log probabilities on to the end of the actor's update. What lies between, such as a
checkpoint, belongs to no iteration. Workers without an engine, whose GPUs only train, are not followed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

from perseus_client.framework import Attachment, require_names, require_version
from perseus_client.phases import Phases

NAME: Final = "verl"
OLDEST: Final = "0.9"
NEWEST_RUN: Final = "0.9"
PHASES: Final = ("rollout", "training")
_GENERATES, _COMPUTES, _TRAINS = "update_weights", ("compute_log_prob", "compute_ref_log_prob"), "update_actor"


def attach(**options: Any) -> Attachment:
    """Follow the hybrid workers of this process from their next update of weights on.

    Args:
        options: keyword arguments of ``perseus_client.connect``, such as ``timing``.

    Returns:
        As ``perseus_client.trl.attach``. Never raises; without an agent nothing is touched.
    """
    phases = Phases(*PHASES, framework=NAME, **options)
    rollout, training = PHASES
    generating = False

    def begin_training() -> None:
        nonlocal generating
        if generating:
            generating = False
            phases.begin(training)

    def computes(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def followed(*args: Any, **kwargs: Any) -> Any:
            begin_training()
            return compute(*args, **kwargs)

        return followed

    def hook() -> None:
        require_version(NAME, importlib.import_module(NAME).__version__, OLDEST, NEWEST_RUN)
        worker = importlib.import_module("verl.workers.engine_workers").ActorRolloutRefWorker
        require_names(NAME, worker, _GENERATES, *_COMPUTES, _TRAINS)
        update_weights, update_actor = getattr(worker, _GENERATES), getattr(worker, _TRAINS)

        @functools.wraps(update_weights)
        async def followed_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal generating
            if self.role in ("actor_rollout", "actor_rollout_ref"):
                generating = True
                phases.begin(rollout)
            return await update_weights(self, *args, **kwargs)

        @functools.wraps(update_actor)
        def followed_actor(*args: Any, **kwargs: Any) -> Any:
            begin_training()
            try:
                return update_actor(*args, **kwargs)
            finally:
                phases.end(training)

        phases.replace(worker, _GENERATES, followed_weights)
        phases.replace(worker, _TRAINS, followed_actor)
        for name in _COMPUTES:
            phases.replace(worker, name, computes(getattr(worker, name)))

    return phases.prepare(hook)


attached: Final = attach()
"""Of this process."""

"""Two steps of verl's own hybrid worker on CPU: ``python verl_worker.py FOLDER``.

The methods are those of verl's class; its engines for training and generation are stand-ins, as both ask for GPUs. It
writes what was marked into ``FOLDER/marks.json``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recorded_marks import connect, marks

import perseus_client

FOLDER = Path(sys.argv[1])


class Engine:
    """What a hybrid worker calls of its engines."""

    engine = SimpleNamespace(get_per_tensor_param=lambda **_: (None, None))

    async def send_weights(self, *_: Any, **__: Any) -> None:
        marks.append("weights")

    def infer_batch(self, data: Any = None) -> None:
        marks.append("log probabilities")

    def train_mini_batch(self, data: Any = None) -> None:
        marks.append("trained")


def hybrid_worker(role: str) -> Any:
    """A worker of verl's class, without the processes and models that its construction asks for."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = object.__new__(ActorRolloutRefWorker)
    rollout = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="nccl"))
    own = {"role": role, "config": SimpleNamespace(rollout=rollout), "enable_routing_replay": False}
    worker.__dict__.update(own, actor=Engine(), ref=Engine(), checkpoint_engine=Engine())
    return worker


if __name__ == "__main__":
    perseus_client.connect = connect
    from verl.utils.import_utils import import_external_libs

    import_external_libs("perseus_client.verl")  # as the worker does with `model.external_lib`
    for role in ("actor_rollout_ref", "actor"):
        one = hybrid_worker(role)
        for step in range(2):
            asyncio.run(one.update_weights(global_steps=step))
            for method in (one.compute_log_prob, one.compute_ref_log_prob, one.update_actor):
                method(None)
        marks.append("|")
    (FOLDER / "marks.json").write_text(json.dumps(marks))

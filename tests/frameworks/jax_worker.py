"""A rank that trains with JAX, in a loop of its own or in MaxText's: ``python jax_worker.py FOLDER jax|maxtext``.

It trains until ``FOLDER/done`` appears, then says in ``LOOP.RANK.result`` how many steps it made. The ranks are
processes of one JAX job, with one device each. Runs under ``perseus_sim.training.live``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import perseus_client

FOLDER, LOOP = Path(sys.argv[1]), sys.argv[2]
WIDTH = 8
SMALL = {
    "base_emb_dim": 16,
    "base_mlp_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1,
}


def done() -> bool:
    """Whether the file is there: the first rank decides."""
    return bool(multihost_utils.broadcast_one_to_all(np.array((FOLDER / "done").exists())))


def batches() -> Iterator[Any]:
    random = np.random.default_rng(jax.process_index())
    while not done():
        yield random.normal(size=(2, WIDTH)).astype("float32")


def of_ones_own() -> int:
    """A loop as on the documentation's page; returns its steps."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def loss_of(weights: Any, batch: Any) -> Any:
        return jnp.mean((batch - jnp.tanh(batch @ weights)) ** 2)

    @jax.jit
    def train_step(weights: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
        return weights - 0.1 * gradient, loss

    weights, made = jax.device_put(np.zeros((WIDTH, WIDTH), "float32"), whole), 0
    for batch in perseus_client.steps(batches(), rank=jax.process_index()):
        weights, loss = train_step(weights, jax.make_array_from_process_local_data(split, batch))
        loss.block_until_ready()
        made += 1
    return made


def of_maxtext() -> int:
    """MaxText's own training, whose function of one iteration is wrapped; returns its steps."""
    from maxtext.trainers.pre_train import train

    phase = perseus_client.Phases("step", rank=jax.process_index())
    iteration, made = train.training_loop_iteration, 0

    def followed(*arguments: Any) -> Any:
        nonlocal made
        if done():
            raise train.exceptions.StopTraining("the test has ended")
        with phase("step"):
            metrics = iteration(*arguments)
        made += 1
        return metrics

    train.training_loop_iteration = followed
    base = Path(train.__file__).parents[2] / "configs" / "base.yml"
    settings = SMALL | {
        "hardware": "cpu",
        "run_name": "small",
        "base_output_directory": FOLDER / f"output-{jax.process_index()}",
        "dataset_type": "synthetic",
        "steps": 10**6,
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "log_config": False,
        "attention": "dot_product",
    }
    train.main(["train", str(base), *(f"{name}={value}" for name, value in settings.items())])
    return made


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, num_processes=ranks, process_id=rank)
    assert jax.device_count() == ranks
    made = {"jax": of_ones_own, "maxtext": of_maxtext}[LOOP]()
    (FOLDER / f"{LOOP}.{rank}.result").write_text(json.dumps({"optimizer_steps": made}))


if __name__ == "__main__":
    main()

"""A rank that trains without pipeline stages, in the loop of one framework: ``python steps_worker.py FOLDER LOOP``.

It trains until ``FOLDER/done`` appears, then says in ``LOOP.RANK.result`` how many optimizer steps it made. Every
iteration accumulates two batches. Runs under ``perseus_sim.training.live``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import perseus_client

ACCUMULATED = 2
FOLDER = Path(sys.argv[1])
WIDTH = 8


class Batches(IterableDataset):  # type: ignore[type-arg]
    """Samples until the file appears, the same number on every rank: the first one decides."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        assert get_worker_info() is None
        while True:
            done = torch.tensor((FOLDER / "done").exists())
            if dist.is_initialized():
                dist.broadcast(done, 0)
            if done:
                return
            for _ in range(2 * ACCUMULATED):
                yield {"x": torch.randn(WIDTH), "labels": torch.randn(1)}


class Model(torch.nn.Module):
    """A small one; ``forward`` takes and returns what Hugging Face's Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


class Counted(torch.optim.SGD):
    """Counts its steps."""

    made = 0

    def step(self, closure: Any = None) -> Any:
        Counted.made += 1
        return super().step(closure)


def by_hand(model: torch.nn.Module) -> None:
    """A loop of one's own around a model that was wrapped."""
    optimizer = Counted(model.parameters(), lr=0.01)
    loader = DataLoader(Batches(), batch_size=2)
    for number, batch in enumerate(perseus_client.steps(loader, model=model, accumulate=ACCUMULATED), 1):
        model(**batch)["loss"].backward()
        if number % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()


def ddp() -> None:
    by_hand(torch.nn.parallel.DistributedDataParallel(Model()))


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in (model.layers[0], model.layers[2]):
        fully_shard(layer)
    fully_shard(model)
    by_hand(model)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = Model()
    model, optimizer = accelerator.prepare(model, Counted(model.parameters(), lr=0.01))
    for batch in perseus_client.steps(DataLoader(Batches(), batch_size=2), model=model, accumulate=ACCUMULATED):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def hugging_face() -> None:
    from transformers import Trainer, TrainingArguments

    import perseus_client.hugging_face

    model = Model()
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "trainer"), max_steps=10**6, per_device_train_batch_size=2, use_cpu=True,
        gradient_accumulation_steps=ACCUMULATED, report_to=[], save_strategy="no", disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=Batches(), optimizers=(Counted(model.parameters(), lr=0.01), None)
    )
    attachment = perseus_client.hugging_face.attach(trainer)
    assert attachment.active
    trainer.control.should_training_stop = False
    trainer.train()


def lightning() -> None:
    import lightning.pytorch as pl

    import perseus_client.lightning

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Counted(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, accumulate_grad_batches=ACCUMULATED,
    )  # fmt: skip
    attachment = perseus_client.lightning.attach(trainer)
    assert attachment.active
    trainer.fit(Module(), DataLoader(Batches(), batch_size=2))


def nemo() -> None:
    """A model of NeMo's, which Lightning trains as any other."""
    import lightning.pytorch as pl
    from nemo.core import ModelPT
    from omegaconf import OmegaConf

    import perseus_client.lightning

    class Small(ModelPT):  # type: ignore[misc]
        def __init__(self, trainer: Any) -> None:
            super().__init__(OmegaConf.create({}), trainer)
            self.model = Model()

        def setup_training_data(self, train_data_config: Any) -> None: ...

        def setup_validation_data(self, val_data_config: Any) -> None: ...

        @classmethod
        def list_available_models(cls) -> list[Any]:
            return []

        def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Counted(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, accumulate_grad_batches=ACCUMULATED,
    )  # fmt: skip
    attachment = perseus_client.lightning.attach(trainer)
    assert attachment.active
    trainer.fit(Small(trainer), DataLoader(Batches(), batch_size=2))


def torchtitan() -> None:
    """torchtitan's own loop and step, around a sharded model and data of ours: its builders ask for CUDA."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.distributed import utils
    from torchtitan.trainer import Trainer

    import perseus_client.torchtitan

    class Sharded(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.layers(x)

    model = fully_shard(Sharded())
    utils.set_pg_timeouts = lambda **_: None
    nothing = SimpleNamespace(
        load=lambda **_: None, save=lambda *_, **__: None, maybe_wait_for_staging=lambda: None, close=lambda: None,
        run=lambda _: None, step=lambda: None, get_metrics=dict, should_log=lambda _: False,
        ntokens_since_last_log=0, data_loading_times=[],
    )  # fmt: skip
    trainer = Trainer.__new__(Trainer)
    trainer.config = SimpleNamespace(
        checkpoint=SimpleNamespace(load_step=-1), dump_folder="", validator=SimpleNamespace(enable=False),
        profiler=SimpleNamespace(build=lambda **_: contextlib.nullcontext(nothing)),
        training=SimpleNamespace(steps=10**6, disable_cuda_graphs=True, max_norm=1.0),
        comm=SimpleNamespace(train_timeout_seconds=60), parallelism=SimpleNamespace(spmd_backend="default"),
    )  # fmt: skip
    trainer.parallel_dims = SimpleNamespace(
        **dict.fromkeys(("dp_enabled", "pp_enabled", "cp_enabled", "ep_enabled", "dp_cp_enabled"), False),
        get_optional_mesh=lambda _: None,
    )
    trainer.checkpointer = trainer.gc_handler = trainer.metrics_processor = trainer.lr_schedulers = nothing
    trainer.optimizers, trainer.model_parts = Counted(model.parameters(), lr=0.01), [model]
    trainer.model_config, trainer.device = None, torch.device("cpu")
    trainer.step = trainer.ntokens_seen = 0
    trainer.gradient_accumulation_steps, trainer.num_pipeline_parallel_microbatches = ACCUMULATED, 1
    trainer.train_context = contextlib.nullcontext
    trainer.loss_fn = lambda output, labels, _: (torch.nn.functional.mse_loss(output, labels.float()), None)
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    loader = DataLoader(Batches(), batch_size=2)
    trainer.dataloader = (({"input": batch["x"]}, batch["labels"].long()) for batch in loader)
    attachment = perseus_client.torchtitan.attach(trainer)
    assert attachment.active
    trainer.train()
    trainer.close()


def main() -> None:
    loop = sys.argv[2]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    globals()[loop]()
    (FOLDER / f"{loop}.{rank}.result").write_text(json.dumps({"optimizer_steps": Counted.made}))
    # A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process (PyTorch 190489), so the
    # group must be gone before: the wrapped model, which holds it, first.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

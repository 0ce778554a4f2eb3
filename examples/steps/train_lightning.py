"""Lightning: ``torchrun --nproc-per-node 2 train_lightning.py [STEPS]``."""

from __future__ import annotations

import os
import sys

import lightning.pytorch as pl
import torch
from model import Model, Text
from torch.utils.data import DataLoader

import perseus_client.lightning


class Module(pl.LightningModule):
    """The model, and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=int((sys.argv[1:] or [100])[0]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    perseus_client.lightning.attach(trainer)
    trainer.fit(Module(), DataLoader(Text(), batch_size=4))

"""Hugging Face's Trainer: ``torchrun --nproc-per-node 2 train_hf.py [STEPS]``."""

from __future__ import annotations

import sys
import tempfile

import torch
from model import Model, Text
from transformers import Trainer, TrainingArguments

import perseus_client.hugging_face

if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=int((sys.argv[1:] or [100])[0]),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},  # every rank reads its own text
    )
    trainer = Trainer(Model(), arguments, train_dataset=Text())
    perseus_client.hugging_face.attach(trainer)
    trainer.train()

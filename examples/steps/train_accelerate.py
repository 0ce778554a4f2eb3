"""Accelerate: ``torchrun --nproc-per-node 2 train_accelerate.py [STEPS]``."""

from __future__ import annotations

import sys
from itertools import islice

import torch
from accelerate import Accelerator
from model import Model, Text
from torch.utils.data import DataLoader

import perseus_client

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = islice(DataLoader(Text(), batch_size=4), int((sys.argv[1:] or [100])[0]))
    for batch in perseus_client.steps(batches):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()

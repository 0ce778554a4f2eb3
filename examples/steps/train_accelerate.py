"""Accelerate: ``torchrun --nproc-per-node 2 train_accelerate.py [STEPS]``."""

from __future__ import annotations

import sys
from itertools import islice

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from model import Model, Text
from torch.utils.data import DataLoader

import perseus_client

if __name__ == "__main__":
    # By name, because a PyTorch that was built with MPI would otherwise be started by mpirun.
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    torch.set_num_threads(1)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = islice(DataLoader(Text(), batch_size=4), int((sys.argv[1:] or [100])[0]))
    for number, batch in enumerate(perseus_client.steps(batches, model=model)):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        if number % 50 == 0:
            accelerator.print(f"step {number}: loss {loss.item():.2f}", flush=True)

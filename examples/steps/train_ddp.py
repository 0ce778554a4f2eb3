"""A loop of one's own around DistributedDataParallel: ``torchrun --nproc-per-node 2 train_ddp.py [STEPS]``."""

from __future__ import annotations

import sys
from itertools import islice

import torch
import torch.distributed as dist
from model import Model, Text
from torch.utils.data import DataLoader

import perseus_client

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = islice(DataLoader(Text(), batch_size=4), int((sys.argv[1:] or [100])[0]))
    for batch in perseus_client.steps(batches, model=model):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    dist.destroy_process_group()

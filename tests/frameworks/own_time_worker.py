"""A rank that trains three steps in the loop of one framework, and writes down its marks: ``FOLDER LOOP``.

Rank 1 does not end its last backward pass before rank 0 has marked the end of its own: were that marked after the wait
for rank 1, as the end of the optimizer is, neither would ever go on. No agent: ``perseus_client.connect`` is replaced.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import steps_worker
import torch
import torch.distributed as dist

import perseus_client
from perseus_client.session import Session

STEPS = 3
PATIENCE_S = 20.0
FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
said: dict[str, Any] = {"marks": "", "options": [], "late": 0}


class Marks(Session):
    """A session that writes down what is called."""

    def step_begin(self) -> None:
        said["marks"] += "("

    def step_end(self) -> None:
        said["marks"] += ")"
        if said["marks"].count(")") == STEPS:
            (FOLDER / "done").touch()

    def instruction_begin(self, *_: Any) -> None:
        said["marks"] += "<"

    def instruction_end(self, *_: Any) -> None:
        said["marks"] += ">"
        (FOLDER / f"{RANK}.{said['marks'].count('>')}").touch()


class Waiting(torch.autograd.Function):
    """Of rank 1, in its last backward pass of each step: wait until rank 0 has ended its own."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Waiting.passes += 1
        step, rest = divmod(Waiting.passes, steps_worker.ACCUMULATED)
        if RANK == 1 and rest == 0 and sys.argv[2] not in {"fsdp", "torchtitan"}:
            deadline_s = time.monotonic() + PATIENCE_S
            while not (FOLDER / f"0.{step}").exists():
                if time.monotonic() > deadline_s:
                    said["late"] += 1
                    break
                time.sleep(0.002)
        return gradient


class Model(steps_worker.Model):
    """The pass waits where it begins."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": Waiting.apply(super().forward(x, labels)["loss"])}


def connect(*_: Any, **options: Any) -> Session:
    said["options"].append(options)
    return Marks()


def main() -> None:
    loop = sys.argv[2]
    perseus_client.connect = connect
    steps_worker.Model = Model  # type: ignore[misc]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    getattr(steps_worker, loop)()
    (FOLDER / f"{loop}.{RANK}.result").write_text(json.dumps(said))
    gc.collect()  # as in steps_worker
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

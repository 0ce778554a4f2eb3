"""A rank of torchtitan's own training, as its own configuration builds it: ``python torchtitan_worker.py FOLDER LOOP``.

The model is its small one, all settings but sizes are its defaults. torchtitan asks for CUDA where it finds no
accelerator; those answers alone are stood in for, so that it takes the CPU, where it captures no graph. It trains until
``FOLDER/done`` appears, then says in ``LOOP.RANK.result`` how many steps it made. Runs under
``perseus_sim.training.live``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

FOLDER, LOOP, RANK = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]


class Cpu:
    """What torchtitan asks of a device, answered by the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...


utils.device_type, utils.device_module = "cpu", Cpu()
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.hf_datasets import text_datasets  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

import perseus_client.torchtitan  # noqa: E402

SETTINGS = {"training.local_batch_size": 2, "training.seq_len": 32, "training.steps": 10**6}


def tokenizer() -> Path:
    """The folder of one that knows a few letters, so that nothing must be downloaded."""
    folder = FOLDER / f"tokenizer-{RANK}"
    folder.mkdir()
    words = Tokenizer(models.WordLevel({"<unk>": 0, **{letter: 1 + n for n, letter in enumerate("abcdefgh")}}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a", "eos_token": "h"}))
    return folder


def attention(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> tuple[torch.Tensor, None]:
    """Causal, as torchtitan's own: that one (FlexAttention) has no backward pass on a CPU."""
    of_torch = torch.nn.functional.scaled_dot_product_attention
    return of_torch(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


def done() -> bool:
    """Whether the file is there: the first rank decides."""
    found = torch.tensor((FOLDER / "done").exists())
    dist.broadcast(found, 0)
    return bool(found)


def main() -> None:
    torch.set_num_threads(1)
    FlexAttention.compiled_flex_attn = staticmethod(attention)
    dist_utils.set_pg_timeouts = lambda **_: None  # by a barrier of CUDA devices
    text_datasets.DATASETS["c4_test"].loader = lambda _: Dataset.from_dict({"text": ["a b c d e f g " * 40] * 8})
    settings = SETTINGS | {"hf_assets_path": tokenizer(), "dump_folder": FOLDER}
    options = [f"--{name}={value}" for name, value in settings.items()]
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *options])
    trainer = config.build()
    for module in (each for part in trainer.model_parts for each in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    trainer.should_continue_training = lambda: not done()
    attachment = perseus_client.torchtitan.attach(trainer)
    assert attachment.active
    trainer.train()
    trainer.close()
    (FOLDER / f"{LOOP}.{RANK}.result").write_text(json.dumps({"optimizer_steps": trainer.step}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

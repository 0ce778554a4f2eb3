"""A rank of torchtitan's own training, as its own configuration builds it: ``python torchtitan_worker.py FOLDER LOOP``.

LOOP is ``torchtitan_defaults``, two ranks that shard the model, or a schedule of two pipeline stages. The model is its
small one, all settings but sizes are its defaults. torchtitan asks for CUDA where it finds no accelerator; those
answers alone are stood in for, so that it takes the CPU, where it captures no graph. Files: ``conftest.Harness``. Runs
under ``perseus_sim.training.live``.
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
from perseus_client.torch_pipelining import schedule_csv  # noqa: E402

DEFAULTS = "torchtitan_defaults"
SETTINGS = {"training.local_batch_size": 4, "training.seq_len": 32, "training.steps": 10**6}
STAGES = {  # with which torchtitan 0.3 refuses CUDA graphs
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": LOOP,
}


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


def go_on(trainer: Any) -> bool:
    """Whether there is another step; after the first one it is said what is run."""
    if LOOP != DEFAULTS and trainer.step == 1:
        if RANK == "0":
            (FOLDER / f"{LOOP}.csv").write_text(schedule_csv(trainer.pp_schedule))
        dist.barrier()
        partial = FOLDER / f"{LOOP}.{RANK}.partial"
        partial.write_text(json.dumps({"first_iteration": 0}))
        os.replace(partial, FOLDER / f"{LOOP}.{RANK}.ready")
    done = torch.tensor((FOLDER / ("done" if LOOP == DEFAULTS else f"{LOOP}.done")).exists())
    dist.broadcast(done, 0)  # the first rank decides
    return not done


def main() -> None:
    torch.set_num_threads(1)
    FlexAttention.compiled_flex_attn = staticmethod(attention)
    dist_utils.set_pg_timeouts = lambda **_: None  # by a barrier of CUDA devices
    text_datasets.DATASETS["c4_test"].loader = lambda _: Dataset.from_dict({"text": ["a b c d e f g " * 40] * 8})
    settings = SETTINGS | ({} if LOOP == DEFAULTS else STAGES) | {"hf_assets_path": tokenizer(), "dump_folder": FOLDER}
    options = [f"--{name}={value}" for name, value in settings.items()]
    options += [] if LOOP == DEFAULTS else ["--training.disable_cuda_graphs"]
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *options])
    trainer = config.build()
    for module in (each for part in trainer.model_parts for each in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    trainer.should_continue_training = lambda: go_on(trainer)
    attachment = perseus_client.torchtitan.attach(trainer)
    assert attachment.active
    trainer.train()
    trainer.close()
    (FOLDER / f"{LOOP}.{RANK}.result").write_text(json.dumps({"optimizer_steps": trainer.step}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

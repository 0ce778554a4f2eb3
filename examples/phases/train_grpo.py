"""Reinforcement learning of a small Llama with TRL's GRPOTrainer: ``python train_grpo.py STEPS``, on CPU or GPU.

It has to learn to say ``h``. Two lines are for Perseus.
"""

from __future__ import annotations

import sys

import pyarrow
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import perseus_client.trl  # for Perseus

UNKNOWN = "<unk>"
WORDS = {word: number for number, word in enumerate(("<pad>", "<eos>", UNKNOWN, *"abcdefgh"))}


def tokenizer() -> PreTrainedTokenizerFast:
    """One that knows a few letters, so that nothing must be downloaded."""
    words = Tokenizer(models.WordLevel(WORDS, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("h")) for completion in completions]


def main() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    arguments = trl.GRPOConfig(
        output_dir="out", max_steps=int(sys.argv[1]), per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    prompts = Dataset(pyarrow.table({"prompt": ["a b", "c d", "e f", "g a"]}), fingerprint="prompts")
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM(config), args=arguments, reward_funcs=reward, train_dataset=prompts,
        processing_class=tokenizer(),
    )  # fmt: skip
    perseus_client.trl.attach(trainer)  # for Perseus
    trainer.train()


if __name__ == "__main__":
    main()

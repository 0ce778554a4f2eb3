"""A small training of TRL's with generated completions on CPU: ``python phases_worker.py FOLDER GRPO|RLOO REUSED``.

It writes what was marked into ``FOLDER/marks.json``. Completions are used for REUSED times as many steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import trl
from datasets import Dataset
from recorded_marks import connect, marks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import perseus_client
import perseus_client.trl

FOLDER, METHOD, REUSED = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
STEPS, PAIR = 4, 2


def reward(completions: list[str], **_: Any) -> list[float]:
    """The number of characters."""
    marks.append("scored")
    return [float(len(completion)) for completion in completions]


def trainer() -> Any:
    words = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>", *"abcdefgh"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    arguments = getattr(trl, f"{METHOD}Config")(
        output_dir=str(FOLDER), max_steps=STEPS, per_device_train_batch_size=PAIR, gradient_accumulation_steps=2,
        num_generations=PAIR, max_completion_length=4, num_iterations=REUSED, beta=0.0, use_cpu=True, bf16=False,
        report_to=[], save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=PAIR,
    )  # fmt: skip
    prompts = Dataset(pyarrow.table({"prompt": ["a b", "c d", "e f", "g h"]}), fingerprint="prompts")
    return getattr(trl, f"{METHOD}Trainer")(
        model=LlamaForCausalLM(config), args=arguments, reward_funcs=reward, train_dataset=prompts,
        eval_dataset=prompts, processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
        ),
    )  # fmt: skip


if __name__ == "__main__":
    perseus_client.connect = connect
    trained = trainer()
    assert perseus_client.trl.attach(trained).active
    trained.train()
    (FOLDER / "marks.json").write_text(json.dumps(marks))

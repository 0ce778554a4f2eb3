"""A model that vLLM serves with random weights: two layers, and a token for each byte. Standard library alone."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<s>", "</s>", "<pad>")
VOCABULARY = 256 + len(SPECIAL)
MOST_TOKENS = 2048


def write_tiny_model(folder: Path) -> None:
    """Write what ``--load-format dummy`` reads: the configuration and the tokenizer."""
    folder.mkdir(parents=True)
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": MOST_TOKENS,
            "vocab_size": VOCABULARY,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "dtype": "float32",
        },
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {"id": 256 + place, "content": name, "special": True, **dict.fromkeys(_NO, False)}
                for place, name in enumerate(SPECIAL)
            ],
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(_letters())}, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_NO = ("single_word", "lstrip", "rstrip", "normalized")


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself if it prints, else one from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]

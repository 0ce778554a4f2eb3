"""A small language model and endless random text, for the scripts of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

VOCABULARY, LENGTH, WIDTH = 128, 16, 32


class Model(torch.nn.Module):
    """Predicts the next token. Returns the loss by name, as Hugging Face's Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True),
            num_layers=2,
            enable_nested_tensor=False,
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Text(IterableDataset[dict[str, torch.Tensor]]):
    """Sequences of tokens, each of which is the one before it plus one."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            text = (torch.randint(VOCABULARY, (1,)) + torch.arange(LENGTH + 1)) % VOCABULARY
            yield {"tokens": text[:-1], "labels": text[1:]}

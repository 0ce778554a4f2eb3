"""Load that is made up: requests that come at random, of lengths like those of a chat, with a burst now and then."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perseus_sim.serving.requests import Request


@dataclass(frozen=True)
class Chat:
    """Requests of one service; lengths are lognormal, arrivals those of a Poisson process.

    Attributes:
        per_second: requests, mean.
        prompt_tokens: median.
        output_tokens: median.
        spread: standard deviation of the logarithm of both lengths.
        most_tokens: of a prompt or an answer.
    """

    per_second: float
    prompt_tokens: int = 300
    output_tokens: int = 150
    spread: float = 0.6
    most_tokens: int = 4_000

    def requests(self, seconds: float, seed: int) -> tuple[Request, ...]:
        """Return those of a while, in the order of arrival."""
        draw, now_s = random.Random(seed), 0.0
        requests: list[Request] = []
        while True:
            now_s += draw.expovariate(self.per_second)
            if now_s >= seconds:
                return tuple(requests)
            prompt, output = (self._length(draw, median) for median in (self.prompt_tokens, self.output_tokens))
            requests.append(Request(now_s, prompt, output))

    def _length(self, draw: random.Random, median: int) -> int:
        return max(1, min(self.most_tokens, round(median * math.exp(draw.gauss(0.0, self.spread)))))


def write_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write requests in a form that ``read_trace`` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        rows.writerows((f"{one.arrival_s:.6f}", one.prompt_tokens, one.output_tokens) for one in requests)

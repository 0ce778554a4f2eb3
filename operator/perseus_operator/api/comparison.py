"""How what a plan saves is measured while the job runs, typed."""

# the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perseus_operator.api.schema import Rule, integer


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How what the plan saves is measured again and again."""

    every_iterations: int = integer(
        "Iterations from one comparison to the next; 0: compare with the baseline alone.",
        minimum=0,
        maximum=1_000_000,
        default=400,
    )
    iterations: int = integer(
        "Iterations at default clocks that are measured in each, after the first, which does not count.",
        minimum=1,
        maximum=7,
        default=3,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.everyIterations == 0 || self.everyIterations >= 10 * (self.iterations + 1)",
            "everyIterations must be 0, or at least ten times as many as run at default clocks (iterations + 1)",
            lambda c: c.every_iterations == 0 or c.every_iterations >= 10 * (c.iterations + 1),
        ),
    )

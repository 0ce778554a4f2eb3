"""How long requests are: tokens of the prompt and of the answer, counted together between fixed edges.

An engine that tells each request by itself counts both of it at one place. A metrics page has a histogram of each, and
nothing of which prompt had which answer: such a request is counted twice, each time with the other length not known.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

LENGTH_EDGES: Final = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
"""Upper edges in tokens, which are also those of vLLM's own histograms; a longer one is counted beyond the last."""
LENGTHS: Final = len(LENGTH_EDGES) + 1
"""Of one kind: one below each edge, and one beyond the last."""
UNKNOWN: Final = LENGTHS
"""Stands for a length that is not known."""
LENGTH_PLACES: Final = (LENGTHS + 1) ** 2
"""Of both together, unknown ones included."""


def length_of(tokens: float) -> int:
    """Return the number of the length at which so many tokens are counted.

    >>> length_of(0), length_of(5), length_of(6), length_of(1e9) == LENGTHS - 1
    (0, 2, 3, True)
    """
    return bisect_left(LENGTH_EDGES, tokens)


def length_place(prompt: int, output: int) -> int:
    """Return the place at which a request is counted.

    Args:
        prompt: the number of its prompt's length, as of `length_of`, or `UNKNOWN`.
        output: the number of its answer's, or `UNKNOWN`.

    >>> lengths_at(length_place(length_of(700), UNKNOWN)) == (length_of(1_000), UNKNOWN)
    True
    """
    return prompt * (LENGTHS + 1) + output


def lengths_at(place: int) -> tuple[int, int]:
    """Return the numbers of both lengths of a place; `UNKNOWN` for one that is not known."""
    return divmod(place, LENGTHS + 1)

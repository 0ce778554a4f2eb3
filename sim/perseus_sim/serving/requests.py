"""Requests to a serving engine: when each comes and how long it is; and how a trace is brought to another load."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Final

from perseus_solver.errors import InvalidProblem

MOST_LOAD: Final = 100.0
"""So many times as many requests at most: more is another trace, and would fill the memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. What `perseus_sim.serving.traces` reads has been checked; nothing is checked here.

    Attributes:
        arrival_s: from the trace's begin.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        cached_tokens: of the prompt, found in the prefix cache: they are not computed.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


def scaled(requests: Sequence[Request], load: float, seed: int) -> tuple[Request, ...]:
    """The same trace at another load, in the order of arrival.

    Below 1 each request stays with this probability, independently of the others. Above 1 whole copies are added, each
    turned by a random time within the trace (what falls off its end comes at its begin), and of the last copy a part.
    Time is not compressed: a burst of ten seconds would become one of five, and the gaps in which clocks change would
    shrink with it, so that a control with a period and a latency would be measured against bursts that nobody sent.
    Copies turned against each other are what more users of the same kind send.

    Args:
        requests: in the order of arrival.
        load: how many times as many requests per second: more than 0, at most `MOST_LOAD`.
        seed: of all that is drawn.

    Raises:
        InvalidProblem: the load is out of range.
    """
    if not 0.0 < load <= MOST_LOAD:
        raise InvalidProblem(f"load must be more than 0 and at most {MOST_LOAD:g}, not {load:g}")
    span_s = requests[-1].arrival_s if requests else 0.0
    return _in_order(_at_load(requests, span_s, load, random.Random(seed)))


def piece(requests: Sequence[Request], begin_s: float, end_s: float) -> tuple[Request, ...]:
    """The requests that arrive from ``begin_s`` until before ``end_s``, as a trace that begins at ``begin_s``.

    Raises:
        InvalidProblem: the piece ends before it begins, or nothing arrives in it.
    """
    if not 0.0 <= begin_s < end_s:
        raise InvalidProblem(f"a piece must end after it begins, at 0 s or later: {begin_s:g} s to {end_s:g} s")
    chosen = tuple(replace(r, arrival_s=r.arrival_s - begin_s) for r in requests if begin_s <= r.arrival_s < end_s)
    if not chosen:
        raise InvalidProblem(f"no request arrives between {begin_s:g} s and {end_s:g} s")
    return chosen


def with_burst(
    requests: Sequence[Request], begin_s: float, length_s: float, factor: float, seed: int
) -> tuple[Request, ...]:
    """The trace with ``factor`` times as many requests for a while; before and after it is as it was.

    The further requests are those of the same while, turned within it, as in `scaled`.

    Args:
        requests: in the order of arrival.
        begin_s: when the burst begins.
        length_s: how long it lasts.
        factor: at least 1, at most `MOST_LOAD`.
        seed: of all that is drawn.

    Raises:
        InvalidProblem: the factor is out of range, or no request arrives in that while.
    """
    if not 1.0 <= factor <= MOST_LOAD:
        raise InvalidProblem(f"a burst's factor must be from 1 to {MOST_LOAD:g}, not {factor:g}")
    end_s = begin_s + length_s
    within = piece(requests, begin_s, end_s)
    burst = (
        replace(r, arrival_s=r.arrival_s + begin_s) for r in _at_load(within, length_s, factor, random.Random(seed))
    )
    return _in_order([*(r for r in requests if not begin_s <= r.arrival_s < end_s), *burst])


def _at_load(requests: Sequence[Request], span_s: float, load: float, draw: random.Random) -> Iterator[Request]:
    """Whole copies, the first as it is and the others turned by a random time, and a part of one more."""
    copies = floor(load)
    for copy in range(copies + 1):
        share = inf if copy < copies else load - copies
        turn_s = draw.uniform(0.0, span_s) if copy else 0.0
        for request in requests:
            if draw.random() < share:
                yield replace(request, arrival_s=(request.arrival_s + turn_s) % span_s) if turn_s else request


def _in_order(requests: Iterator[Request] | Sequence[Request]) -> tuple[Request, ...]:
    return tuple(sorted(requests, key=lambda request: request.arrival_s))

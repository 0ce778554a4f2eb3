"""A made-up day of load on a pool beside an autoscaler that reads its running requests, in virtual time: each quarter
of a minute Kubernetes' formula looks, and the pool's restraint after it.
"""

from __future__ import annotations

import math
import random
from typing import Final, NamedTuple

from tests.doubles.autoscaler import PERIOD_S, Autoscaler

from perseus_operator.families.serving.features.autoscaler.reading import autoscalers_of
from perseus_operator.families.serving.features.autoscaler.restraint import Restraint

DAY_S: Final = 86_400
LLAMA: Final = {("apps", "Deployment", "llama")}
CARRIED: Final = 8.0
"""Requests a second of a replica at its target and at default clocks."""


class Walk(NamedTuple):
    """A walk through a load, every quarter of a minute."""

    replicas: list[int]
    lowered: list[bool]
    restraint: Restraint


def day(seed: int) -> list[float]:
    """Requests a second: twelve times as many at noon as at night, with noise, and a burst in two hours."""
    draw, load, drift, burst = random.Random(seed), [], 0.0, 0.0
    for second in range(0, DAY_S, PERIOD_S):
        drift = 0.97 * drift + draw.gauss(0.0, 0.02)
        burst = 0.2 * draw.random() if draw.random() < 1 / 480 else 0.96 * burst
        hour = 8.0 + 92.0 * (0.5 - 0.5 * math.cos(2 * math.pi * second / DAY_S)) ** 1.5
        load.append(hour * (1.0 + drift + burst) * (1.0 + draw.gauss(0.0, 0.02)))
    return load


def walk(
    load: list[float],
    slowdown: float,
    *,
    restrained: bool = True,
    least: int = 2,
    follows: bool = True,
    alternate: bool = False,
) -> Walk:
    """Walk through it.

    Args:
        load: requests a second, every quarter of a minute.
        slowdown: by what factor lowered clocks let requests stay for longer; 1: as without us.
        restrained: whether the pool heeds the autoscaler.
        least: replicas.
        follows: whether the metric is of running requests; False: of requests a second.
        alternate: there is another metric like it, and every other minute each of them is a tenth below the other.
    """
    autoscaler, restraint = Autoscaler(least, least=least, tolerance=0.1), Restraint()
    replicas, states, lowered, mean = list[int](), list[bool](), False, load[0] / CARRIED
    for place, per_s in enumerate(load):
        at_target = per_s * (slowdown if lowered and follows else 1.0) / CARRIED
        mean += 0.4 * (at_target - mean)  # what is scraped is a mean of the last half minute
        if place:
            read = autoscalers_of([autoscaler.body("running", "busy")], LLAMA) if restrained else ()
            restraint.looked(read, load[place - 1], float(place * PERIOD_S), lowered=lowered)
            lowered = not restraint.near
        shares = (1.0, 0.9) if place * PERIOD_S // 60 % 2 else (0.9, 1.0)
        autoscaler.look(place * PERIOD_S, *((share * mean for share in shares) if alternate else (mean,)))
        replicas.append(autoscaler.replicas)
        states.append(lowered)
    return Walk(replicas, states, restraint)


def share_apart(one: Walk, other: Walk) -> tuple[int, float]:
    """By how many replicas two walks differ at most, and for what share of the time."""
    apart = [abs(a - b) for a, b in zip(one.replicas, other.replicas, strict=True)]
    return max(apart), sum(map(bool, apart)) / len(apart)

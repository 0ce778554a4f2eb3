"""What goes wrong in a seed: a list that the seed draws, so that it can be shrunk."""

from __future__ import annotations

import random
from typing import Final

from tests.simulation.faults import KINDS
from tests.simulation.kinds import Fault

LIMITED: Final = 0.15
"""Of seeds, the share in which power is limited from early on: what a PowerBudget promises takes a plan to show."""

WAVERS: Final = 0.05
"""Of seeds, the share in which a user changes his mind while what is sent to one of his nodes is late."""


def draw(seed: int, *, until_s: float, most: int = 8) -> list[Fault]:
    """What goes wrong in a seed, by time; it is over ``until_s``."""
    own = random.Random(f"faults of {seed}")
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    found = list[Fault]()
    if own.random() < LIMITED:
        found.append(Fault(own.uniform(2, 10), "power limited", own.randrange(64), 0, own.random()))
        if own.random() < 0.4:  # whoever decides about it is gone once there is a plan
            found.append(Fault(own.uniform(14, until_s - 6), "operators gone", 0, own.uniform(0.5, 6), own.random()))
    for name in own.choices(names, weights, k=own.randint(0, most)):
        kind = KINDS[name]
        at_s, lasts_s = own.uniform(0.5, until_s - 2), own.uniform(*kind.lasts_s)
        stays = kind.may_stay and own.random() < 0.3
        place = own.randrange(64)
        if found and own.random() < 0.5:  # faults that meet show more than those far from each other
            other = own.choice(found)
            place = other.place
            if own.random() < 0.5:
                at_s = min(max(0.5, other.at_s + own.uniform(-2, 2)), until_s - 2)
        found.append(Fault(at_s, name, place, 0 if stays else min(lasts_s, until_s - at_s), own.random()))
    found += _wavering(random.Random(f"wavers of {seed}"))
    return sorted(found, key=lambda fault: fault.at_s)


def _wavering(own: random.Random) -> list[Fault]:
    """Of a job with a fixed clock, whose leases ask for it."""
    if own.random() >= WAVERS:
        return []
    at_s, place = own.uniform(6, 16), own.choice((3, 5))
    held = Fault(at_s, "messages held", place, 10.0, own.uniform(0.5, 1.0))
    return [held, Fault(at_s + own.uniform(1, 3), "job wavers", place, own.uniform(3, 7), own.random())]

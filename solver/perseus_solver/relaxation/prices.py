"""Choose the price to solve next: the one that may raise the bound most.

The value L(v) that a price v proves is concave in the price. Between two prices it lies above their chord and below the
chords on either side, prolonged. Where those meet is the most that a new line may rise above the known ones. For a
smooth curve, solving there divides the uncertainty by four; for a straight piece it removes it.

Flows that are composed of parts prove less than L(v) at high prices. Where a price proves less than a lower one
implies, because no iteration is shorter than the shortest, it is only a limit: what lies between the two is not known,
and the next price is their geometric mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats

_CLOSE = 1.5
"""Ratio of a limit to the price before it from which on nothing is to be found between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Uncertainty:
    """For every two neighbouring prices, up to the first limit, the price in between at which L is least known.

    Attributes:
        price_w: float[intervals], that price, watts.
        most_j: float[intervals], upper bound on L there, joules.
        least_j: float[intervals], lower bound on L there, joules.
        makespan_s: float[intervals], where the lines of the two prices meet, seconds, or the shortest makespan.
    """

    price_w: Floats
    most_j: Floats
    least_j: Floats
    makespan_s: Floats

    @classmethod
    def between(cls, price_w: Floats, value_j: Floats, fastest_s: float, slowest_s: float) -> Uncertainty:
        """Return the uncertainty between prices.

        Args:
            price_w: float[prices], increasing, watts.
            value_j: float[prices], L at each, joules. Its slope is a makespan, between the two given.
            fastest_s, slowest_s: shortest and longest makespan, seconds.
        """
        slope = np.diff(value_j) / np.diff(price_w)
        limits = np.flatnonzero(slope < fastest_s)
        count = int(limits[0]) + 1 if len(limits) else len(slope)
        left_w, right_w, left_j, slope = price_w[:count], price_w[1 : count + 1], value_j[:count], slope[:count]
        before = np.maximum(np.append(slowest_s, slope[:-1]), slope)
        after = np.minimum(np.append(slope[1:], fastest_s), slope)
        # The chords of the neighbours, prolonged from the left and from the right, meet at this share of the way.
        bend = before - after
        share = np.divide(slope - after, bend, out=np.full_like(bend, 0.5), where=bend > 0)
        if len(limits):
            slope[-1] = fastest_s
            share[-1] = 0.5
            if left_w[-1] > 0:
                ratio = float(right_w[-1] / left_w[-1])
                share[-1] = 1.0 / (1.0 + math.sqrt(ratio)) if ratio > _CLOSE else 0.0
        along_w = share * (right_w - left_w)
        return cls(left_w + along_w, left_j + before * along_w, left_j + slope * along_w, slope)

    def rise_j(self) -> Floats:
        """Return by how many joules a line in between may raise the envelope of all lines, at most."""
        return self.most_j - self.least_j

    def rise_at_j(self, makespan_s: float, known_j: float) -> Floats:
        """Return the same at one makespan, where the envelope is known to be ``known_j``."""
        return self.most_j - self.price_w * makespan_s - known_j

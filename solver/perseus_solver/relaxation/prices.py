"""Which price to solve next: the one that may tell most about the frontier.

What a price proves, L(v), is concave in the price. Between two prices it lies above their chord and below the chords on
either side, prolonged; where those meet is the most that a new line may rise above the known ones. Solving there halves
the doubt about a smooth curve four times over, and settles a straight piece at once. Pure numbers; called by ``curve``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Uncertainty:
    """For every two neighbouring prices, the price in between where their knowledge is poorest.

    Attributes:
        price_w: that price.
        most_j: L is at most this there.
        least_j: and at least this.
        makespan_s: where the lines of the two prices meet.
    """

    price_w: Floats
    most_j: Floats
    least_j: Floats
    makespan_s: Floats

    @classmethod
    def between(cls, price_w: Floats, value_j: Floats, fastest_s: float, slowest_s: float) -> Uncertainty:
        """``value_j``: L at rising prices; its slope is a makespan, between the two given."""
        width = np.diff(price_w)
        slope = np.diff(value_j) / width
        before = np.maximum(np.append(slowest_s, slope[:-1]), slope)
        after = np.minimum(np.append(slope[1:], fastest_s), slope)
        # From the left at the slope before, from the right at the slope after: where they meet, as a share of the way.
        bend = before - after
        share = np.divide(slope - after, bend, out=np.full_like(bend, 0.5), where=bend > 0)
        least = value_j[:-1] + slope * share * width
        return cls(price_w[:-1] + share * width, least + (before - slope) * share * width, least, slope)

    def rise_j(self) -> Floats:
        """How much a line in between may raise the envelope of all lines, at most."""
        return self.most_j - self.least_j

    def rise_at_j(self, makespan_s: float, known_j: float) -> Floats:
        """The same at one makespan, where the envelope is known to reach so high."""
        return self.most_j - self.price_w * makespan_s - known_j

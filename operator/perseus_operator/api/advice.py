"""The part of a PerseusJob's status that predicts: what the objective asks for and would save, and what it costs to
measure the profile.
"""

# the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass

from perseus_operator.api.objective import PERCENT, PERCENT_RULE, WEEK_US, signed
from perseus_operator.api.schema import integer, text


@dataclass(frozen=True, kw_only=True)
class AdviceStatus:
    """What the objective asks for, whether or not clocks may be touched."""

    point: int = integer("Index on the frontier, 0 is the fastest.", minimum=0, maximum=100_000)
    iteration_time_microseconds: int = integer("Predicted time of an iteration.", minimum=0, maximum=WEEK_US)
    energy_millijoules: int = integer("Predicted energy of all GPUs in an iteration.", minimum=0, maximum=2**53)
    energy_saved: str | None = signed(
        "That energy against the measured baseline; absent: no baseline. A prediction: what is saved is in savings.",
        required=False,
    )
    energy_saved_low: str | None = signed("The prediction is at least this; absent: not known.", False)
    energy_saved_high: str | None = signed("And at most this.", False)
    rests_on: str | None = text(
        "Profile (that the spec names, or the job's own), MatchingProfile (another one of the same GPUs, driver and"
        " shape, whose instructions take as long) or Model (published curves of the GPU); the latter two in mode"
        " Observe alone.",
        rule="Profile, MatchingProfile or Model",
        max_length=16,
        pattern="^(Profile|MatchingProfile|Model)$",
        required=False,
    )
    source: str | None = text("The same in a clause.", rule="a clause", max_length=512, required=False)


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """What measuring the profile costs at most, before it begins."""

    clocks: int = integer("Clocks that are measured.", minimum=1, maximum=1000)
    iterations: int = integer("Training iterations at these clocks.", minimum=1, maximum=2**31 - 1)
    duration_seconds: int | None = integer(
        "Training time of these iterations; absent: no iteration is measured yet.",
        minimum=1,
        maximum=7 * 24 * 3600,
        required=False,
    )
    mean_slowdown: str = text(
        "By how much these iterations are slower, on average.", rule=PERCENT_RULE, max_length=9, pattern=PERCENT
    )
    most_slowdown: str = text(
        "By how much those at the lowest clock are.", rule=PERCENT_RULE, max_length=9, pattern=PERCENT
    )

"""What the series of a ServingPool say, in the words of Prometheus' labels: values that its family fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from perseus_core.serving import ClockReason

FIRST_TOKEN: Final = "first_token"  # noqa: S105 - no password
OUTPUT_TOKEN: Final = "output_token"  # noqa: S105
TIMES: Final = (FIRST_TOKEN, OUTPUT_TOKEN)
"""Values of the label ``time``: of a request, until its first token, and between two of its tokens."""
SEEN, SILENT, UNKNOWN, DIFFERENT = "seen", "silent", "unknown", "different"
ENGINES: Final = (SEEN, SILENT, UNKNOWN, DIFFERENT)
"""Values of the label ``engine``: what is known of that of a pod."""
OTHER: Final = "Other"
"""A reason of an agent that is newer than the operator, or lies: a label must not hold whatever an agent says."""
REASONS: Final = (*(reason.value for reason in ClockReason), OTHER)
"""Values of the label ``limited_by``: the words of the status."""
FAILED: Final = "Failed"
"""A fit that has ended without a verdict; the others are the solver's."""


class SavedShare(NamedTuple):
    """Of the energy of a token, and the ends of its 95 % interval."""

    share: float
    low: float
    high: float
    comparisons: int


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """One pool now. What is not known is None, or missing in a mapping.

    Attributes:
        pods: how many, by one of ``ENGINES``.
        clock_mhz: mean of the replicas lately, the default clocks counted as the highest.
        limits_s: by one of ``TIMES``.
        attainment: share of the requests that kept the limit lately, by one of ``TIMES``.
        attainment_wanted: share that shall.
        saved: measured.
        advised: replicas.
        overloaded: replicas.
        canary_mhz: that is tried now, the default clocks as the highest.
        table: whether there is a table of clocks.
        lowest_mhz: of the table.
        explained: whether the model explains the engine.
    """

    pods: Mapping[str, int]
    clock_mhz: int | None = None
    limits_s: Mapping[str, float] = field(default_factory=dict)
    attainment: Mapping[str, float] = field(default_factory=dict)
    attainment_wanted: float | None = None
    saved: SavedShare | None = None
    advised: int | None = None
    overloaded: int = 0
    canary_mhz: int | None = None
    table: bool = False
    lowest_mhz: int | None = None
    explained: bool | None = None


@dataclass(frozen=True, kw_only=True)
class PoolCounts:
    """What one replica did in a while.

    Attributes:
        requests: that ended.
        judged: times of requests that have a limit, by one of ``TIMES``.
        late: those of them that are not certain to have kept it.
        prompt_tokens: computed.
        generated_tokens: by all requests.
        energy_mj: of its GPUs; None: not measured.
        running_us: integral over time of the requests that decode.
        held_us: how long each reason held the clock, in an agent's words.
    """

    requests: int
    judged: Mapping[str, int]
    late: Mapping[str, int]
    prompt_tokens: int
    generated_tokens: int
    energy_mj: int | None
    running_us: float
    held_us: Mapping[str, int]

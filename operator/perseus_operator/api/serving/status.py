"""The status of a ServingPool, typed: everything but conditions. Replicas are few in it, however many there are."""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from perseus_core.serving import MOST_EDGES
from perseus_operator.api.objective import PERCENT, PERCENT_RULE, signed
from perseus_operator.api.power_status import PowerSmoothingStatus, ShareStatus
from perseus_operator.api.schema import choice, integer, listing, names, nested, text
from perseus_operator.api.serving.spec import DURATION, DURATION_RULE

MOST_REPLICAS: Final = 32
"""In a status; those that keep the limits least come first."""
MOST_ADVISED: Final = 2_000
"""As many as the planner plans with."""

MOST_GPUS: Final = 1_024
"""Of a replica."""
MOST_CLASSES: Final = 9
"""Of lengths: short, medium and long prompts, each with short, medium and long answers."""


def _class_name(description: str) -> str:
    return text(description, rule="a class of lengths", max_length=32, pattern="^[a-z]+(-[a-z]+)*$")  # type: ignore[no-any-return]


def _percent(description: str, *, required: bool = False) -> str | None:
    return text(description, rule=PERCENT_RULE, max_length=9, pattern=PERCENT, required=required)  # type: ignore[no-any-return]


def _duration(description: str) -> str | None:
    return text(description, rule=DURATION_RULE, max_length=11, pattern=DURATION, required=False)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica lately."""

    pod: str = text("Its pod.", rule="the name of a pod", max_length=253)
    clock_megahertz: int | None = integer(
        "Mean of its clock, the default clocks counted as the highest; absent: not known.",
        minimum=0,
        maximum=10_000,
        required=False,
    )
    limited_by: str | None = text(
        "What held its clock longest: Floor, Trim, Boost, Hold, BeyondTable, MemoryFull, NoSample, ImpossibleSample or"
        " Ordered; AutoscalerNear: all have default clocks for a HorizontalPodAutoscaler; absent: not known.",
        rule="a word",
        max_length=64,
        pattern="^[A-Z][A-Za-z]+$",
        required=False,
    )
    attainment: str | None = _percent("Share of its requests that kept the limits; absent: not known.")


@dataclass(frozen=True, kw_only=True)
class AttainmentStatus:
    """How requests kept the limits lately."""

    requests: int = integer("How many ended.", minimum=0, maximum=2**53)
    time_to_first_token: str | None = _percent("Share that kept the limit of this time; absent: it has none.")
    time_per_output_token: str | None = _percent("Share that kept the limit of this time; absent: it has none.")


@dataclass(frozen=True, kw_only=True)
class ProposedLimits:
    """What 99 % of the requests kept lately, at the clocks of that time."""

    time_to_first_token: str | None = _duration("Of this time.")
    time_per_output_token: str | None = _duration("Of this time.")


@dataclass(frozen=True, kw_only=True)
class BaselineStatus:
    """What 99 % of the requests kept at default clocks. A later operator goes on with it."""

    time_to_first_token: str | None = _duration("Of this time; absent: no request had one.")
    time_per_output_token: str | None = _duration("Of this time; absent: no request had one.")


@dataclass(frozen=True, kw_only=True)
class CanaryStatus:
    """The replica at which lower clocks are tried."""

    pod: str = text("Its pod.", rule="the name of a pod", max_length=253)
    clock_megahertz: int = integer("That is tried; 0: the default clocks.", minimum=0, maximum=10_000)
    why: str = text(
        "Tried, Measured, NearLimit, Missed, Waits or Lowest.", rule="a word", max_length=16, pattern="^[A-Z][A-Za-z]+$"
    )


@dataclass(frozen=True, kw_only=True)
class MissedClock:
    """A clock at which a limit was missed. A later operator goes on with it."""

    clock_megahertz: int = integer("The clock.", minimum=1, maximum=10_000)
    misses: int = integer("How often.", minimum=1, maximum=1_000_000)
    not_before: str = text(
        "Date and time before which it is not tried again, RFC 3339.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        string_format="date-time",
    )


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """Of which engine the profile is, and how far it is."""

    fingerprint: str = text(
        "SHA-256 over all that the time of a step depends on; after a change the profile is measured anew.",
        rule="a digest",
        max_length=64,
    )
    engine: str = text("Name and version of the engine.", rule="a name", max_length=256)
    model: str = text("Name of the weights.", rule="a name", max_length=512)
    role: str | None = text(
        "Mixed, Prefill or Decode: as spec.role, or the engines' own configuration, says.",
        rule="a word",
        max_length=16,
        pattern="^[A-Z][A-Za-z]+$",
        required=False,
    )
    windows: int = integer("Seconds or so of replicas that count.", minimum=0, maximum=1_000_000)
    lowest_megahertz: int | None = integer(
        "The lowest clock of the table in force; absent: there is no table.",
        minimum=1,
        maximum=10_000,
        required=False,
    )
    profile: str | None = text(
        "The PerseusProfile that has what was measured of it; absent: none yet.",
        rule="a name, and a namespace where it is another",
        max_length=600,
        required=False,
    )
    missed_clocks: tuple[MissedClock, ...] | None = listing(
        "Clocks at which a limit was missed.", MissedClock, key="clockMegahertz", max_items=MOST_EDGES
    )


@dataclass(frozen=True, kw_only=True)
class PoolSavings:
    """Energy of a generated token while clocks follow the load, against default clocks on the same replicas."""

    energy: str = signed("Saved; negative: it takes more.")
    low: str = signed("Lower end of the 95 % interval.")
    high: str = signed("Upper end of the 95 % interval.")
    blocks: int = integer("Minutes-long blocks at default clocks that were compared.", minimum=1, maximum=1_000_000)
    millijoules_per_token: int = integer("Of the clocks that follow the load.", minimum=0, maximum=2**53)


@dataclass(frozen=True, kw_only=True)
class AdviceStatus:
    """How many replicas the load needs at their highest clock. Nobody scales by it but who asks for it."""

    replicas: int | None = integer(
        "So many; absent: nothing is advised, and autoscalers keep what there is.",
        minimum=1,
        maximum=MOST_ADVISED,
        required=False,
    )
    why: str = text("In words.", rule="a sentence", max_length=512)
    since: str | None = text(
        "Date and time since which this number is advised, RFC 3339. A later operator goes on with it.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        string_format="date-time",
        required=False,
    )
    requests_per_minute: int | None = integer(
        "That came in the last minute, at all replicas.", minimum=0, maximum=2**53, required=False
    )
    expected_per_minute: int | None = integer(
        "The most that is expected until a replica that is started now serves.",
        minimum=0,
        maximum=2**53,
        required=False,
    )
    start_seconds: int | None = integer(
        "From the creation of a pod until its engine speaks, median of the latest; absent: none was seen, and 300 are"
        " taken. A later operator goes on with it.",
        minimum=1,
        maximum=3_600,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class LoadStatus:
    """The load that was counted, for a later operator to go on with."""

    until: str = text(
        "Date and time at which the last quarter of an hour of it ended, RFC 3339.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        string_format="date-time",
    )
    epochs: str = text(
        "Mean and heaviest minute of each quarter of an hour, two weeks of them at most, packed.",
        rule="base64",
        max_length=4_096,
        pattern="^[A-Za-z0-9+/]+={0,2}$",
    )


@dataclass(frozen=True, kw_only=True)
class LengthClass:
    """Requests of one class of lengths."""

    name: str = _class_name(
        "Of prompts of at most 200 tokens (s), 1,000 (m) or more (l), and of answers of at most 100 (s), 500 (m) or"
        " more (l): prompt-s-answer-m."
    )
    share: str = _percent("Of all requests.", required=True)  # type: ignore[assignment]
    prompt_tokens: int = integer("Of a prompt, mean.", minimum=0, maximum=10_000_000)
    output_tokens: int = integer("Of an answer, mean.", minimum=0, maximum=10_000_000)


class LengthsFrom(StrEnum):
    """By what lengths were counted."""

    REQUESTS = "Requests"
    HISTOGRAMS = "Histograms"


@dataclass(frozen=True, kw_only=True)
class LengthsStatus:
    """How long requests were, those of a day ago counted half."""

    requests: int = integer("That ended, and count.", minimum=0, maximum=2**53)
    source: LengthsFrom = choice(
        "Requests: prompt and answer of each were counted together, by the plugin. Histograms: each for itself, by"
        " metrics pages, and they are taken as independent of each other.",
        LengthsFrom,
    )
    classes: tuple[LengthClass, ...] | None = listing(
        "Those with requests.", LengthClass, key="name", max_items=MOST_CLASSES
    )


@dataclass(frozen=True, kw_only=True)
class PlannedPoolStatus:
    """A pool of the plan."""

    name: str = _class_name("Of its requests: as in status.lengths, several letters for several classes, or all.")
    share: str = _percent("Of all requests.", required=True)  # type: ignore[assignment]
    gpus: int = integer("Of a replica, at the heaviest hour.", minimum=0, maximum=MOST_GPUS)
    replicas: int = integer("At the heaviest hour.", minimum=0, maximum=MOST_ADVISED)
    fewest_replicas: int = integer("At the lightest hour.", minimum=0, maximum=MOST_ADVISED)
    clock_megahertz: int = integer("The least, at the heaviest hour.", minimum=0, maximum=10_000)
    watt_hours: int = integer("Of its GPUs, of a day.", minimum=0, maximum=10**12)


@dataclass(frozen=True, kw_only=True)
class PoolPlanStatus:
    """Whether several pools by length would need less than one, for the day that is forecast. Nothing acts on it."""

    computed_at: str = text(
        "When, RFC 3339. A later operator goes on with it.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        string_format="date-time",
    )
    why: str = text("In words.", rule="a sentence", max_length=512)
    pools: tuple[PlannedPoolStatus, ...] | None = listing(
        "That need least; one, if no split pays; absent: there is no plan.",
        PlannedPoolStatus,
        key="name",
        max_items=MOST_CLASSES,
    )
    watt_hours: int | None = integer("Of the GPUs of all, of a day.", minimum=0, maximum=10**12, required=False)
    saved: str | None = signed("Energy, against one pool.", required=False)
    gap: str | None = _percent("By which the plan may need more than the best there is.")


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """What the operator observes and does."""

    replicas: tuple[ReplicaStatus, ...] | None = listing(
        "Some replicas, those that keep the limits least first.", ReplicaStatus, key="pod", max_items=MOST_REPLICAS
    )
    replica_count: int | None = integer(
        "Replicas with an engine that says what it does.", minimum=0, maximum=1_000_000, required=False
    )
    attainment: AttainmentStatus | None = nested("Of all replicas lately.", AttainmentStatus, required=False)
    proposed_limits: ProposedLimits | None = nested(
        "Limits to begin with, where the spec has none.", ProposedLimits, required=False
    )
    baseline: BaselineStatus | None = nested(
        "What maxSlowdown is relative to; absent: the spec has none, or too few requests ended.",
        BaselineStatus,
        required=False,
    )
    advice: AdviceStatus | None = nested(
        "How many replicas the load needs at their highest clock; absent: spec.scaling is Off.",
        AdviceStatus,
        required=False,
    )
    load: LoadStatus | None = nested(
        "What the forecast rests on; absent: spec.scaling is Off, or less than a quarter of an hour was counted.",
        LoadStatus,
        required=False,
    )
    lengths: LengthsStatus | None = nested(
        "How long requests were; absent: too few ended whose engine says it.", LengthsStatus, required=False
    )
    plan: PoolPlanStatus | None = nested(
        "Whether pools by length would save; absent: spec.scaling is Off, or nothing was computed yet.",
        PoolPlanStatus,
        required=False,
    )
    canary: CanaryStatus | None = nested("Where lower clocks are tried.", CanaryStatus, required=False)
    engine: EngineStatus | None = nested("What is known of the engine.", EngineStatus, required=False)
    savings: PoolSavings | None = nested("What is saved, measured.", PoolSavings, required=False)
    power_budget: ShareStatus | None = nested("The pool's share of a PowerBudget.", ShareStatus, required=False)
    power_profiles: tuple[str, ...] | None = names(
        "Workload power profiles that the driver enforces on GPUs of the pool; absent: none.",
        rule="a name of a power profile",
        pattern=r"^[A-Z][A-Z0-9_]*$",
        max_items=256,
    )
    power_smoothing: PowerSmoothingStatus | None = nested(
        "Power smoothing of GPUs of the pool; absent: none is smoothed.", PowerSmoothingStatus, required=False
    )

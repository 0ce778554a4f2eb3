"""One GPU as its agent describes it: its model, and how long its clock changes take.

Latencies that were measured are stored with a profile as JSON, so that later jobs on the same model start from them.
Nothing of that format is taken on trust: what cannot be true is as if it were absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from perseus_core.clock_latency import ClockLatency, Transition
from perseus_core.power_policy import PowerPolicy

MAX_BOARD_W: Final = 10_000.0
"""No GPU, nor a module with its CPU, draws more; agents hold energy counters to the same number."""
UNKNOWN_BOARD_W: Final = 1_500.0
"""Counts where a driver does not tell the board's limit: the highest of a GPU that is sold is 1.4 kW (B300)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its agent describes it.

    Attributes:
        latency: None: nothing is measured, or the agent is older.
        max_power_w: the highest power limit of the board; None: the driver does not say, or the agent is older.
        policy: what the driver holds it to beside clocks; None: it has none, or the agent is older.
    """

    model: str
    driver: str = ""
    latency: ClockLatency | None = None
    max_power_w: float | None = None
    policy: PowerPolicy | None = None


@dataclass(frozen=True)
class PowerSmoothing:
    """GPUs whose driver smooths their power.

    Attributes:
        gpus: how many; 0: none is smoothed.
        floor_w: what they are kept at together while a load ramps down, watts.
        secondary_floor_w: what delayed smoothing keeps them at together while idle, watts; 0: there is none.
    """

    gpus: int = 0
    floor_w: int = 0
    secondary_floor_w: int = 0


def smoothing_of(policies: Iterable[PowerPolicy]) -> PowerSmoothing:
    """What power smoothing keeps GPUs at by their drivers' policies."""
    return summed_smoothing(
        PowerSmoothing(1, policy.floor_w, policy.secondary_floor_w)
        for policy in policies
        if policy.floor_w or policy.secondary_floor_w
    )


def summed_smoothing(parts: Iterable[PowerSmoothing]) -> PowerSmoothing:
    """What power smoothing keeps the GPUs of all parts at."""
    gpus = floor_w = secondary_floor_w = 0
    for part in parts:
        gpus += part.gpus
        floor_w += part.floor_w
        secondary_floor_w += part.secondary_floor_w
    return PowerSmoothing(gpus, floor_w, secondary_floor_w)


@dataclass(frozen=True)
class StoredLatency:
    """What an earlier job measured on its GPUs; it is stored with the profile."""

    model: str
    driver: str
    latency: ClockLatency


def latency_to_json(stored: StoredLatency) -> str:
    """A stored latency as JSON: model, driver and figures in microseconds."""
    latency = stored.latency
    document = {
        "model": stored.model,
        "driver": stored.driver,
        "p50Microseconds": latency.p50_us,
        "p99Microseconds": latency.p99_us,
        "callMicroseconds": latency.call_us,
        "changes": latency.changes,
        "sharedLock": latency.shared_lock,
        "transitions": [[one.from_mhz, one.to_mhz, one.changes, one.p50_us, one.p99_us] for one in latency.transitions],
    }
    return json.dumps(document, separators=(",", ":"))


def latency_from_json(text: str) -> StoredLatency | None:
    """What ``latency_to_json`` wrote; None: it is damaged or out of range, and the published figures hold."""
    try:
        raw: Any = json.loads(text)
        latency = ClockLatency(
            p50_us=int(raw["p50Microseconds"]),
            p99_us=int(raw["p99Microseconds"]),
            call_us=int(raw["callMicroseconds"]),
            changes=int(raw["changes"]),
            shared_lock=bool(raw["sharedLock"]),
            transitions=tuple(Transition(*map(int, one)) for one in raw["transitions"]),
        )
        read = StoredLatency(str(raw["model"]), str(raw["driver"]), latency)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return read if latency.is_possible else None

"""Engines on the wire: orders for them, and what agents say of them, with every bound checked.

A tenant's process fills an engine and its windows: what cannot be true is as if it had never arrived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from perseus_core.clock_latency import MAX_CLOCK_MHZ
from perseus_core.lengths import LENGTH_PLACES
from perseus_core.serving import FOLLOW_TABLE, MOST_SEQUENCES, TIME_EDGES_US, ClockTable, EngineOrders, ServingLimits
from perseus_core.units import mean_power_w, ppm_from_ratio, ratio_from_ppm, us_from_s
from perseus_operator.clients.agents.validation import MAX_NAME, MAX_POWER_W
from perseus_operator.nodes.engines import MOST_ENGINES, Engine, EngineWindow
from perseus_proto.v1alpha1 import agent_pb2

_MOST_FLAGS: Final = 256
_LONGEST_FLAG: Final = 1_024
_MOST_GPUS: Final = 64
"""Of one engine on one node."""
_LONGEST_US: Final = 3_600_000_000
"""A window is about a second, but it ends with a step: an engine that rests has long ones."""
_WRITTEN_LATE_US: Final = 100_000
"""An engine times its steps by itself, and a window ends when the last was written: never exactly at its end."""
_MOST_HELD: Final = 16
_TIMES: Final = len(TIME_EDGES_US) + 1
_MOST_COUNT: Final = 10**7
"""Steps, requests or tokens of one window: ten million a second are beyond any engine."""
_REASON: Final = re.compile(r"[A-Z][A-Za-z]{0,63}")


@dataclass(frozen=True)
class EngineJoined:
    """An engine has connected."""

    engine: Engine


@dataclass(frozen=True)
class EngineLeft:
    """An engine has disconnected."""

    engine: Engine


def orders_request(job_uid: str, epoch: int, orders: EngineOrders | None) -> agent_pb2.OrderEnginesRequest:
    """Convert orders; None: all engines run at their default clocks."""
    orders = orders or EngineOrders(ServingLimits(None, None))
    return agent_pb2.OrderEnginesRequest(
        job_uid=job_uid,
        epoch=epoch,
        table=None if orders.table is None else _table_message(orders.table),
        limits=_limits_message(orders.limits),
        orders=[
            agent_pb2.EngineOrder(pod_uid=uid, follow_table=mhz == FOLLOW_TABLE, clock_mhz=max(0, mhz))
            for uid, mhz in sorted(orders.clocks_mhz.items())
        ],
        pages=[
            agent_pb2.EnginePage(pod_uid=uid, host=page.host, port=page.port, path=page.path)
            for uid, page in sorted(orders.pages.items())
        ],
    )


def _table_message(table: ClockTable) -> agent_pb2.ClockTable:
    return agent_pb2.ClockTable(
        running=table.running,
        kv_share_ppm=map(ppm_from_ratio, table.kv_share),
        clocks_mhz=[mhz for row in table.clocks_mhz for mhz in row],
        ladder_mhz=table.ladder_mhz,
        boost_mhz=table.boost_mhz,
    )


def _limits_message(limits: ServingLimits) -> agent_pb2.ServingLimits:
    return agent_pb2.ServingLimits(
        first_token_us=us_from_s(limits.first_token_s or 0.0),
        per_token_us=us_from_s(limits.per_token_s or 0.0),
        attainment_ppm=ppm_from_ratio(limits.attainment),
    )


def engine_of(message: agent_pb2.Engine) -> Engine | None:
    """Convert an engine; None: it has more than any can have, or a text that is none."""
    texts = message.name, message.version, message.model, message.parallelism
    if len(message.flags) > _MOST_FLAGS or len(message.gpu_uuids) > _MOST_GPUS:
        return None
    flags = tuple((flag.name, flag.value) for flag in message.flags)
    long = max(map(len, (message.pod_uid, *texts, *message.gpu_uuids))) > MAX_NAME
    if long or not all(map(str.isprintable, texts)) or list(flags) != sorted(set(flags)):
        return None
    if any(max(len(name), len(value)) > _LONGEST_FLAG for name, value in flags):
        return None
    return Engine(message.pod_uid, message.pid, *texts, flags, tuple(message.gpu_uuids))


def change_of(event: agent_pb2.TelemetryEvent) -> EngineJoined | EngineLeft | None:
    """Convert the event that an engine joins or leaves; None: as of ``engine_of``."""
    joined = event.HasField("engine_joined")
    engine = engine_of(event.engine_joined if joined else event.engine_left)
    if engine is None:
        return None
    return EngineJoined(engine) if joined else EngineLeft(engine)


def faults_of(message: agent_pb2.Lease) -> dict[str, str]:
    """Return why no engine of a pod is followed, by its UID."""
    return {
        fault.pod_uid: fault.message[:MAX_NAME]
        for fault in message.engine_faults[:MOST_ENGINES]
        if len(fault.pod_uid) <= MAX_NAME
    }


def energies_of(message: agent_pb2.Lease) -> dict[str, int]:
    """Return what all GPUs of a pod have used, in millijoules, by its UID."""
    return {
        energy.pod_uid: energy.energy_mj
        for energy in message.energies[:MOST_ENGINES]
        if len(energy.pod_uid) <= MAX_NAME
    }


def window_of(message: agent_pb2.EngineWindow) -> EngineWindow | None:
    """Convert a window; None: it has more than any can have."""
    first, tokens = (_counted_of(times, _TIMES) for times in (message.first_tokens, message.tokens))
    lengths = _counted_of(message.lengths, LENGTH_PLACES)
    if first is None or tokens is None or lengths is None or len(message.held) > _MOST_HELD:
        return None
    return EngineWindow(
        pod_uid=message.pod_uid,
        pid=message.pid,
        time_us=message.time_us,
        clock_mhz=message.clock_mhz,
        changed=message.changed,
        default_us=message.default_us,
        mhz_us=message.mhz_us,
        running=message.running_milli / 1_000,
        kv_share=ratio_from_ppm(message.kv_share_ppm),
        steps=message.steps,
        steps_us=message.steps_us,
        prompt_steps=message.prompt_steps,
        prompt_steps_us=message.prompt_steps_us,
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        energy_mj=message.energy_mj if message.has_energy else None,
        median_clock_mhz=message.median_clock_mhz,
        waiting=message.waiting,
        requests=message.requests,
        first_tokens=first,
        tokens=tokens,
        held_us={held.reason: held.time_us for held in message.held},
        lengths=lengths,
    )


def _counted_of(message: agent_pb2.Counted, most: int) -> dict[int, int] | None:
    """The counts by their places, of which there are so many at most."""
    places: Sequence[int] = message.places
    if len(places) != len(message.counts) or len(places) > most:
        return None
    counted = dict(zip(places, message.counts, strict=True))
    return counted if list(counted) == sorted(places) and len(counted) == len(places) else None


def is_valid_window(window: EngineWindow) -> bool:
    """Whether an engine can have done that in its time."""
    time_us = window.time_us
    counts = window.steps, window.prompt_steps, window.prompt_tokens, window.generated_tokens, window.requests
    return (
        0 < time_us <= _LONGEST_US
        and len(window.pod_uid) <= MAX_NAME
        and max(window.clock_mhz, window.median_clock_mhz) <= MAX_CLOCK_MHZ
        and window.default_us <= time_us
        and window.mhz_us <= time_us * MAX_CLOCK_MHZ
        and window.running <= MOST_SEQUENCES
        and window.kv_share <= 1.0
        and max(*counts, window.waiting) <= _MOST_COUNT
        and window.steps_us + window.prompt_steps_us <= time_us + time_us // 10 + _WRITTEN_LATE_US
        and (window.energy_mj is None or mean_power_w(window.energy_mj, time_us) <= MAX_POWER_W * _MOST_GPUS)
        and all(_are_valid(times, _TIMES) for times in (window.first_tokens, window.tokens))
        and _are_valid(window.lengths, LENGTH_PLACES)
        and all(_REASON.fullmatch(reason) and held_us <= time_us for reason, held_us in window.held_us.items())
    )


def _are_valid(counted: Mapping[int, int], places: int) -> bool:
    return max(counted, default=0) < places and sum(counted.values()) <= _MOST_COUNT

"""What a GPU has measured of its clock changes, as a message: the agent writes it, the operator reads it.

A description cannot be trusted: it is bounded here, and one that cannot be true is none.
"""

from __future__ import annotations

from typing import Final

from perseus_core.clock_latency import ClockLatency, Transition
from perseus_proto.v1alpha1 import agent_pb2

MAX_TRANSITIONS: Final = 64
"""Pairs of clocks of one GPU, the most frequent."""


def encode_latency(latency: ClockLatency, *, call_p99_us: int) -> agent_pb2.ClockLatency:
    """Return the message of a latency.

    Args:
        latency: as measured, or as published for the model.
        call_p99_us: 99th percentile of the duration of a call, which is for those who look at the node alone.
    """
    return agent_pb2.ClockLatency(
        p50_us=latency.p50_us,
        p99_us=latency.p99_us,
        call_p50_us=latency.call_us,
        call_p99_us=call_p99_us,
        changes=latency.changes,
        source=latency.source,
        shared_lock=latency.shared_lock,
        transitions=[
            agent_pb2.ClockTransition(
                from_mhz=one.from_mhz, to_mhz=one.to_mhz, changes=one.changes, p50_us=one.p50_us, p99_us=one.p99_us
            )
            for one in latency.transitions[:MAX_TRANSITIONS]
        ],
    )


def decode_latency(message: agent_pb2.ClockLatency) -> ClockLatency | None:
    """Return the latency of a message, without its phrase; None: it cannot be true."""
    latency = ClockLatency(
        p50_us=message.p50_us,
        p99_us=message.p99_us,
        call_us=message.call_p50_us,
        changes=message.changes,
        shared_lock=message.shared_lock,
        transitions=tuple(
            Transition(one.from_mhz, one.to_mhz, one.changes, one.p50_us, one.p99_us)
            for one in message.transitions[:MAX_TRANSITIONS]
        ),
    )
    return latency if latency.is_possible else None

"""What a GPU has measured of its clock changes, over the wire."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from perseus_core.clock_latency import ClockLatency, Transition
from perseus_core.latency import MAX_LATENCY_US
from perseus_proto.latency import MAX_TRANSITIONS, decode_latency, encode_latency
from perseus_proto.v1alpha1 import agent_pb2

NUMBERS = st.integers(0, 2**32 - 1)
LATENCIES = st.builds(
    ClockLatency,
    p50_us=NUMBERS,
    p99_us=NUMBERS,
    call_us=NUMBERS,
    shared_lock=st.booleans(),
    source=st.text(max_size=20),
    changes=NUMBERS,
    transitions=st.lists(st.builds(Transition, *[NUMBERS] * 5), max_size=3).map(tuple),
)
POSSIBLE = st.tuples(*[st.integers(1, MAX_LATENCY_US)] * 2, st.integers(0, MAX_LATENCY_US))


@given(latency=LATENCIES, figures=POSSIBLE)
def test_what_an_agent_describes_is_what_the_operator_reads(latency: ClockLatency, figures: tuple[int, ...]) -> None:
    *of_change, call_us = figures
    possible = replace(latency, p50_us=min(of_change), p99_us=max(of_change), call_us=call_us)
    message = encode_latency(possible, call_p99_us=7)
    read = agent_pb2.ClockLatency.FromString(message.SerializeToString())
    assert decode_latency(read) == replace(possible, source="")


@given(latency=LATENCIES)
def test_a_latency_that_cannot_be_true_is_none(latency: ClockLatency) -> None:
    decoded = decode_latency(encode_latency(latency, call_p99_us=0))
    assert decoded == (replace(latency, source="") if latency.is_possible else None)


def test_no_more_transitions_travel_or_are_read_than_the_bound() -> None:
    many = tuple(Transition(1, mhz, 1, 1, 1) for mhz in range(1, 4 * MAX_TRANSITIONS))
    sent = encode_latency(ClockLatency(1, 1, 1, False, transitions=many), call_p99_us=0)
    assert len(sent.transitions) == MAX_TRANSITIONS
    sent.transitions.extend(list(sent.transitions))
    read = decode_latency(sent)
    assert read is not None
    assert read.transitions == many[:MAX_TRANSITIONS]

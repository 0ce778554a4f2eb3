"""What the operator concludes from the numbers of ranks and agents: equal, shrinking, zero or huge, no conclusion ends
it, and each lies within its bounds."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_core.instruction import InstructionKind
from perseus_core.iteration import IterationReport
from perseus_core.latency import MAX_LATENCY_US
from perseus_operator.clients.agents.hardware import gpu_of
from perseus_operator.clients.agents.validation import is_valid_report
from perseus_operator.families.training.features.profile.drift import Drift
from perseus_operator.nodes.iterations import History
from perseus_operator.nodes.latencies import latency_by_clock, measured_latency
from perseus_operator.solving.calibration import FrontierTimes
from perseus_proto.v1alpha1 import agent_pb2
from perseus_solver import solve_frontier
from perseus_solver.kinds import Options
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import Profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

STAGES, MICROBATCHES, PIPELINES = 2, 3, 2
TABLES = {
    (stage, kind, 0): Options(
        stage=stage,
        kind=kind,
        chunk=0,
        frequency_mhz=np.array([1410, 900], dtype=np.int32),
        time_s=np.array([0.01, 0.014]),
        energy_j=np.array([4.0, 3.0]),
    )
    for stage in range(STAGES)
    for kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD)
}
PROFILE = Profile(stages=STAGES, tables=TABLES)
PROBLEM = build_problem(
    PROFILE, build_schedule("1F1B", stages=STAGES, microbatches=MICROBATCHES), blocking_power_w=80.0
)
PLANNED = FrontierTimes(Simulator(PROBLEM), solve_frontier(PROBLEM))
WORDS = st.sampled_from([0, 1, 2, 1_000, 20_000, 1_000_000, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
POSSIBLE = st.sampled_from([1, 2, 20_000, 2**32 - 1])
"""Of an instruction that is measured: one that took no time was not."""


@pytest.mark.parametrize("words", [[1] * 6, [2**32 - 1] * 6, [6, 5, 4, 3, 2, 1], [1, 2**32 - 1] * 3])
def test_paces_are_known_of_any_times_that_are_measured(words: list[int]) -> None:
    history = History(PIPELINES, STAGES)
    places = [(dp, stage) for dp in range(PIPELINES) for stage in range(STAGES)]
    *_, done = (
        history.add(IterationReport(*place, 0, 1, 10**9, 10**9, 1, None, array("I", words))) for place in places
    )
    assert done is not None
    assert set(PLANNED.paces(done)) == set(range(PIPELINES))


@settings(max_examples=100)
@given(st.data())
def test_paces_and_drift_are_known_whatever_ranks_say_of_their_instructions(data: st.DataObject) -> None:
    history, drift = History(PIPELINES, STAGES), Drift()
    lengths = st.sampled_from([2 * MICROBATCHES] * 4 + [0, 1, 9])
    for iteration in data.draw(st.lists(st.integers(0, 9), max_size=6)):
        for dp in range(PIPELINES):
            for stage in range(STAGES):
                length = data.draw(lengths)
                words = data.draw(st.sampled_from([POSSIBLE, POSSIBLE, POSSIBLE, WORDS]))
                durations_us = array("I", data.draw(st.lists(words, min_size=length, max_size=length)))
                point = data.draw(st.none() | WORDS)
                report = IterationReport(dp, stage, 0, iteration, 10**9, 10**9, 1, point, durations_us)
                done = history.add(report) if is_valid_report(report) else None
                if done is None:
                    continue
                paces = PLANNED.paces(done)
                assert all(len(own) == STAGES and all(map(math.isfinite, own)) for own in paces.values())
                drift = drift.observe(paces)
                assert 0 <= drift.stage < STAGES
                assert 0 <= drift.pace < math.inf


@st.composite
def gpus(draw: st.DrawFn) -> agent_pb2.Gpu:
    """What an agent may say of one."""
    figures = st.tuples(WORDS, WORDS, WORDS, WORDS, WORDS)
    transitions = [
        agent_pb2.ClockTransition(from_mhz=a, to_mhz=b, changes=c, p50_us=d, p99_us=e)
        for a, b, c, d, e in draw(st.lists(figures, max_size=8))
    ]
    p50_us, p99_us, call_us, changes, _ = draw(figures)
    return agent_pb2.Gpu(
        model=draw(st.sampled_from(["NVIDIA A100-SXM4-80GB", "", "x" * 1_000])),
        max_power_mw=draw(WORDS),
        clock_latency=agent_pb2.ClockLatency(
            p50_us=p50_us, p99_us=p99_us, call_p50_us=call_us, changes=changes, transitions=transitions
        ),
    )


@given(st.lists(gpus(), max_size=6))
def test_latencies_are_within_their_bounds_whatever_agents_say_of_their_clock_changes(
    said: list[agent_pb2.Gpu],
) -> None:
    known = [gpu.latency for gpu in (gpu_of(one, "570") for one in said) if gpu.latency is not None]
    if not known:
        return
    together = measured_latency("NVIDIA A100-SXM4-80GB", known)
    for latency in known if together is None else [*known, together]:
        assert 0 < latency.p50_us <= latency.p99_us <= MAX_LATENCY_US
        for clock in latency_by_clock(latency, known).values():
            assert 0 < clock.p50_us <= clock.p99_us <= MAX_LATENCY_US

"""Laws of schedules and of the simulator, over random sizes, orders and graphs.

Every schedule runs each required instruction exactly once, respects data flow and has no cycle. A simulation is what a
naive walk over the graph gives, and longer durations never shorten it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_up_profiles import PIPELINES

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidSchedule
from perseus_solver.kinds import Options
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import Profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import Schedule, build_schedule, read_schedule, write_schedule
from perseus_solver.schedules.base import ABSENT, assemble
from perseus_solver.topology import STUCK, levels


def build(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """A schedule of about these sizes: those that the schedule cannot run are moved to the nearest it can."""
    if name == "DualPipe":
        stages += stages % 2
        microbatches = max(microbatches + microbatches % 2, 2 * stages)
    if name == "Interleaved1F1B":
        microbatches -= microbatches % stages if microbatches > stages else 0
        return build_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return build_schedule(name, stages=stages, microbatches=microbatches)


ROUNDING_S = 1e-12  # starts are computed as end − duration
sizes = {"stages": st.integers(1, 9), "microbatches": st.integers(1, 24), "chunks": st.integers(2, 4)}


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=40, deadline=None)
@given(**sizes)
def test_every_schedule_runs_every_instruction_once_without_deadlock(
    name: str, stages: int, microbatches: int, chunks: int
) -> None:
    schedule = build(name, stages, microbatches, chunks)
    stages, microbatches = schedule.stages, schedule.microbatches
    ran: Counter[tuple[str, int, int]] = Counter()  # (what, microbatch, place in the model)
    recomputed: Counter[tuple[int, int]] = Counter()
    for stage in range(stages):
        for what, microbatch, chunk in schedule.of_stage(stage):
            place = int(schedule.position[stage, chunk])
            if place == ABSENT:
                recomputed[stage, microbatch] += 1
            else:
                ran[what, microbatch, place] += 1
    assert set(ran.values()) == {1}
    places = int(schedule.position.max()) + 1
    for microbatch in range(microbatches):
        for place in range(places):
            assert ran["forward", microbatch, place] == 1
            assert ran["backward", microbatch, place] + ran["input_gradient", microbatch, place] == 1
            assert ran["weight_gradient", microbatch, place] == ran["input_gradient", microbatch, place]
    if name == "EarlyRecompute1F1B":
        assert recomputed == Counter({(s, m): 1 for s in range(stages - 1) for m in range(microbatches)})
    else:
        assert not recomputed

    before, after = schedule.edges()
    level = levels(schedule.instructions, before, after)
    assert (level != STUCK).all()
    assert (level[before] < level[after]).all()


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=20, deadline=None)
@given(**sizes, seed=st.integers(0, 2**31))
def test_simulated_times_respect_the_data_flow(
    name: str, stages: int, microbatches: int, chunks: int, seed: int
) -> None:
    """Checked against the definition of the data flow, not against the schedule's edges."""
    schedule = build(name, stages, microbatches, chunks)
    stages = schedule.stages
    problem = build_problem(random_profile(stages, seed), schedule, blocking_power_w=1, delay_s=0.125)
    run = Simulator(problem).run(np.zeros(problem.instructions, dtype=int))
    span = {}
    for i, stage in enumerate(schedule.stage.tolist()):
        place = int(schedule.position[stage, schedule.chunk[i]])
        what = InstructionKind(int(schedule.kind[i]))
        if place != ABSENT:
            key = InstructionKind.BACKWARD if what is InstructionKind.INPUT_GRADIENT else what
            span[key, int(schedule.microbatch[i]), place] = (run.start_s[i], run.end_s[i], stage)
    places = int(schedule.position.max()) + 1
    for (what, microbatch, place), (start, _, stage) in span.items():
        needs = []
        if what is InstructionKind.FORWARD and place > 0:
            needs.append((InstructionKind.FORWARD, microbatch, place - 1))
        if what is InstructionKind.BACKWARD:
            needs.append((InstructionKind.FORWARD, microbatch, place))
            if place < places - 1:
                needs.append((InstructionKind.BACKWARD, microbatch, place + 1))
        if what is InstructionKind.WEIGHT_GRADIENT:
            needs.append((InstructionKind.BACKWARD, microbatch, place))
        for need in needs:
            _, end, source = span[need]
            assert start >= end + (0.125 if source != stage else 0) - ROUNDING_S
    for stage in range(stages):
        own = slice(int(problem.stage_offset[stage]), int(problem.stage_offset[stage + 1]))
        assert all(a <= b for a, b in pairwise(run.start_s[own]))
        assert (run.end_s[own][:-1] <= run.start_s[own][1:] + ROUNDING_S).all()


@pytest.mark.parametrize("name", [n for n in PIPELINES if n not in {"DualPipe", "EarlyRecompute1F1B"}])
@settings(max_examples=15, deadline=None)
@given(**sizes)
def test_schedules_round_trip_through_torch_csv(name: str, stages: int, microbatches: int, chunks: int) -> None:
    schedule = build(name, stages, microbatches, chunks)
    again = read_schedule(write_schedule(schedule))
    for field in ("kind", "microbatch", "chunk", "stage_offset", "position"):
        assert (getattr(again, field) == getattr(schedule, field)).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 25))
def test_simulation_is_what_a_naive_walk_gives(data: st.DataObject, n: int) -> None:
    """Random graphs with random delays, numbered so that edges do not simply run upwards."""
    seed = data.draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    name = rng.permutation(n)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.2]
    before = np.array([name[a] for a, _ in pairs], dtype=np.int32)
    after = np.array([name[b] for _, b in pairs], dtype=np.int32)
    delay = rng.choice([0.0, 0.5, rng.random()], len(pairs))
    problem = graph_problem(rng.uniform(0.1, 2, n), before, after, delay)
    simulator = Simulator(problem)
    duration = simulator.duration_s(np.zeros(n, dtype=int))

    start: dict[int, float] = {}
    for node in name.tolist():  # a topological order, by construction
        start[node] = max(
            (
                start[a] + duration[a] + d
                for a, b, d in zip(before.tolist(), after.tolist(), delay, strict=True)
                if b == node
            ),
            default=0.0,
        )
    end = {node: start[node] + duration[node] for node in start}
    makespan = max(end.values())
    assert simulator.end_s(duration) == pytest.approx([end[i] for i in range(n)])

    latest: dict[int, float] = {}
    for node in name[::-1].tolist():
        latest[node] = min(
            (
                latest[b] - duration[b] - d
                for a, b, d in zip(before.tolist(), after.tolist(), delay, strict=True)
                if a == node
            ),
            default=makespan,
        )
    assert simulator.slack_s(duration) == pytest.approx([latest[i] - end[i] for i in range(n)], abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(PIPELINES), **sizes, seed=st.integers(0, 2**31))
def test_longer_durations_never_shorten_the_iteration(
    name: str, stages: int, microbatches: int, chunks: int, seed: int
) -> None:
    schedule = build(name, stages, microbatches, chunks)
    simulator = Simulator(build_problem(random_profile(schedule.stages, seed), schedule, blocking_power_w=1))
    rng = np.random.default_rng(seed)
    duration = simulator.duration_s(np.zeros(schedule.instructions, dtype=int))
    longer = duration * np.where(rng.random(duration.size) < 0.3, rng.uniform(1, 2, duration.size), 1)
    assert (simulator.end_s(longer) >= simulator.end_s(duration)).all()
    # and within its slack an instruction can grow for free
    slack = np.maximum(simulator.slack_s(duration), 0)
    one = int(rng.integers(duration.size))
    grown = duration.copy()
    grown[one] += slack[one]
    assert simulator.end_s(grown).max() == pytest.approx(simulator.end_s(duration).max())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), stages=st.integers(1, 4), microbatches=st.integers(1, 4))
def test_any_shuffled_schedule_either_runs_or_is_refused_as_deadlock(seed: int, stages: int, microbatches: int) -> None:
    """The reader accepts exactly those schedules that can be executed, one instruction after the other."""
    rng = np.random.default_rng(seed)
    per_stage = []
    for _ in range(stages):
        order = [(kind, m) for kind in ("F", "B") for m in range(microbatches)]
        for _ in range(int(rng.integers(0, 3))):
            a, b = rng.integers(0, len(order), 2)
            order[a], order[b] = order[b], order[a]
        per_stage.append(order)
    text = "".join(",".join(f"{s}{kind}{m}" for kind, m in order) + "\n" for s, order in enumerate(per_stage))

    done: set[tuple[str, int, int]] = set()
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(per_stage):
            if at[stage] == len(order):
                continue
            kind, m = order[at[stage]]
            if kind == "F":
                ready = stage == 0 or ("F", m, stage - 1) in done
            else:
                ready = ("F", m, stage) in done and (stage == stages - 1 or ("B", m, stage + 1) in done)
            if ready:
                done.add((kind, m, stage))
                at[stage] += 1
                moved = True
    if len(done) == 2 * stages * microbatches:
        assert read_schedule(text).instructions == len(done)
    else:
        with pytest.raises(InvalidSchedule, match="the schedule deadlocks"):
            read_schedule(text)


def random_profile(stages: int, seed: int) -> Profile:
    rng = np.random.default_rng(seed)
    tables = {
        (stage, kind, 0): Options(
            stage=stage,
            kind=kind,
            chunk=0,
            frequency_mhz=np.array([1000], dtype=np.int32),
            time_s=rng.uniform(0.5, 2, 1),
            energy_j=rng.uniform(0.5, 2, 1),
        )
        for stage in range(stages)
        for kind in InstructionKind
        if kind is not InstructionKind.CONSTANT
    }
    return Profile(stages=stages, tables=tables)


def graph_problem(
    duration: np.ndarray[tuple[int], np.dtype[np.float64]],
    before: np.ndarray[tuple[int], np.dtype[np.int32]],
    after: np.ndarray[tuple[int], np.dtype[np.int32]],
    delay: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> Problem:
    """A problem that is any graph; the schedule in it only names things."""
    n = duration.size
    order = np.column_stack([np.full(n, InstructionKind.FORWARD), np.arange(n), np.zeros(n, dtype=int)])
    schedule = assemble("graph", [order], microbatches=n, position=np.zeros((1, 1)))
    options = tuple(
        Options(
            stage=0,
            kind=InstructionKind.FORWARD,
            chunk=0,
            frequency_mhz=np.array([1000], dtype=np.int32),
            time_s=np.array([t]),
            energy_j=np.array([1.0]),
        )
        for t in duration
    )
    return Problem(
        schedule=schedule,
        options=options,
        option_of=np.arange(n, dtype=np.int32),
        edge_from=before,
        edge_to=after,
        edge_delay_s=delay,
        stage_offset=schedule.stage_offset,
        blocking_power_w=1.0,
    )

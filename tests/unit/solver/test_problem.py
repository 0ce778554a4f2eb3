"""Joining a profile and a schedule: which rows an instruction takes, and what is refused."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProblem
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import Profile, read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

HEADER = "stage,instruction,frequency,time,energy"


def profile(stages: int, kinds: tuple[str, ...] = ("forward", "backward"), extra: str = "") -> Profile:
    rows = "".join(
        f"{s},{kind},{f},{(s + 1) * 1000 / f},{s + f / 1000}\n"
        for s in range(stages)
        for kind in kinds
        for f in (1000, 500)
    )
    return read_profile(f"{HEADER}\n{rows}{extra}")


def test_edges_are_the_stage_order_and_the_data_flow() -> None:
    problem = build_problem(profile(2), build_schedule("1f1b", stages=2, microbatches=1), blocking_power_w=10)
    # F0 B0 on stage 0 are 0 and 1, on stage 1 they are 2 and 3
    edges = set(zip(problem.edge_from.tolist(), problem.edge_to.tolist(), strict=True))
    assert edges == {(0, 1), (2, 3), (0, 2), (3, 1)}
    assert problem.stage_offset.tolist() == [0, 2, 4]


def test_delay_is_paid_between_stages_only() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=1)
    still = build_problem(profile(2), schedule, blocking_power_w=10)
    moved = build_problem(profile(2), schedule, blocking_power_w=10, delay_s=0.25, overhead_s=2)
    choice = np.zeros(4, dtype=int)
    times = [float(Simulator(p).run(choice).iteration_time_s) for p in (still, moved)]
    assert times[1] == pytest.approx(times[0] + 2 * 0.25 + 2)
    one_way = build_problem(profile(2), schedule, blocking_power_w=10, delay_s=np.array([[9, 0.5], [0, 9]]))
    assert float(Simulator(one_way).run(choice).iteration_time_s) == pytest.approx(times[0] + 0.5)


def test_chunks_without_rows_of_their_own_share_the_stage() -> None:
    schedule = build_schedule("Interleaved1F1B", stages=2, microbatches=2, chunks=4)
    problem = build_problem(profile(2), schedule, blocking_power_w=0)
    for table in problem.options:
        whole = profile(2).tables[table.stage, table.kind, 0]
        assert table.time_s * 4 == pytest.approx(whole.time_s)
        assert table.energy_j * 4 == pytest.approx(whole.energy_j)


def test_chunks_with_rows_of_their_own_take_them() -> None:
    rows = "".join(
        f"{s},{what},1000,{1 + s + 10 * c},1,{c}\n" for s in (0, 1) for what in ("forward", "backward") for c in (0, 1)
    )
    measured = read_profile(f"{HEADER},chunk\n{rows}")
    schedule = build_schedule("Interleaved1F1B", stages=2, microbatches=2, chunks=2)
    problem = build_problem(measured, schedule, blocking_power_w=0)
    for i in range(problem.instructions):
        table = problem.options[problem.option_of[i]]
        assert table.time_s[0] == 1 + schedule.stage[i] + 10 * schedule.chunk[i]
        assert (table.stage, table.chunk, table.kind) == (schedule.stage[i], schedule.chunk[i], schedule.kind[i])


def test_dualpipe_takes_the_whole_row_of_each_place() -> None:
    kinds = ("forward", "backward", "input_gradient", "weight_gradient")
    schedule = build_schedule("DualPipe", stages=4, microbatches=8)
    problem = build_problem(profile(4, kinds), schedule, blocking_power_w=0)
    for table in problem.options:
        place = table.stage if table.chunk == 0 else 3 - table.stage
        assert table.time_s == pytest.approx(profile(4, kinds).tables[place, table.kind, 0].time_s)


def test_recomputations_cost_a_forward_unless_measured() -> None:
    schedule = build_schedule("EarlyRecompute1F1B", stages=2, microbatches=2)
    problem = build_problem(profile(2), schedule, blocking_power_w=0)
    again = next(t for t in problem.options if (t.stage, t.kind, t.chunk) == (0, InstructionKind.FORWARD, 1))
    assert again.time_s == pytest.approx(profile(2).tables[0, InstructionKind.FORWARD, 0].time_s)


def test_constants_are_single_options() -> None:
    loading = profile(2, extra="0,constant,0,0.125,3\n")
    schedule = build_schedule("1f1b", stages=2, microbatches=3, constants=loading.constant_stages)
    problem = build_problem(loading, schedule, blocking_power_w=0)
    constant = next(t for t in problem.options if t.kind is InstructionKind.CONSTANT)
    assert constant.frequency_mhz.tolist() == [0]
    assert constant.time_s.tolist() == [0.125]
    with pytest.raises(InvalidProblem, match="constant instruction for stage 0, which schedule 1F1B does not run"):
        build_problem(loading, build_schedule("1f1b", stages=2, microbatches=3), blocking_power_w=0)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("ZBH1", {}, "the schedule ZBH1 needs 'input_gradient' of stage 0, for which the profile has no rows"),
        ("1f1b", {"blocking_power_w": -1.0}, "blocking_power_w must be a finite number, zero or more, not -1.0"),
        ("1f1b", {"blocking_power_w": float("nan")}, "blocking_power_w must be a finite number"),
        ("1f1b", {"overhead_s": float("inf")}, "overhead_s must be a finite number"),
        ("1f1b", {"delay_s": -0.1}, "delay_s must be finite, zero or more"),
        ("1f1b", {"delay_s": np.zeros(3)}, "delay_s must be one number or a 2 × 2 matrix, not of shape (3,)"),
    ],
)
def test_refusals_name_what_is_missing(name: str, parameters: dict[str, object], message: str) -> None:
    schedule = build_schedule(name, stages=2, microbatches=2)
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        build_problem(profile(2), schedule, **({"blocking_power_w": 1.0} | parameters))  # type: ignore[arg-type]


def test_a_schedule_for_more_stages_than_measured_is_refused() -> None:
    schedule = build_schedule("1f1b", stages=3, microbatches=2)
    with pytest.raises(InvalidProblem, match="needs stage 2, but the profile has only 2 stages"):
        build_problem(profile(2), schedule, blocking_power_w=0)


def test_the_largest_pipeline_builds_quickly() -> None:
    measured = profile(64)
    begin = time.process_time()
    problem = build_problem(measured, build_schedule("1f1b", stages=64, microbatches=1536), blocking_power_w=80)
    Simulator(problem)
    assert problem.instructions == 196_608
    assert time.process_time() - begin < 20  # measured: 0.4 s; a busy machine doubles it

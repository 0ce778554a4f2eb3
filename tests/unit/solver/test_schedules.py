"""Named schedules have their published lengths; bad counts and bad CSVs are refused with clear messages."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.made_up_profiles import PIPELINES

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProfile, InvalidSchedule
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule, read_schedule, with_constants, write_schedule

UNIT = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{what},1000,{duration},1\n"
    for stage in range(8)
    for what, duration in (("forward", 1), ("backward", 2), ("input_gradient", 1), ("weight_gradient", 1))
)


def length(name: str, stages: int, microbatches: int, chunks: int | None = None) -> float:
    """Iteration time when a forward, an input gradient and a weight gradient of a stage take one second each."""
    schedule = build_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    problem = build_problem(read_profile(UNIT, stages=stages), schedule, blocking_power_w=0)
    return float(Simulator(problem).run(np.zeros(problem.instructions, dtype=int)).iteration_time_s)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 4), (4, 8), (8, 24), (6, 11)])
def test_lengths_are_the_published_ones(stages: int, microbatches: int) -> None:
    work, hops = 3 * microbatches, stages - 1
    assert length("GPipe", stages, microbatches) == work + 3 * hops
    assert length("1f1b", stages, microbatches) == work + 3 * hops
    if microbatches >= stages:
        assert length("ZBH1", stages, microbatches) == work + hops  # a third of 1F1B's bubble
    if microbatches >= 2 * stages - 1:
        assert length("ZBV", stages, microbatches) == work + hops / 2
    if stages % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * stages:
        # (PP / 2 − 1)(F&B + B − 3W) in the table of github.com/deepseek-ai/DualPipe, with F&B as long as F and B
        assert length("DualPipe", stages, microbatches) == work + stages - 2
    if microbatches % stages == 0:
        for chunks in (2, 3, 4):
            assert length("Interleaved1F1B", stages, microbatches, chunks) == pytest.approx(work + 3 * hops / chunks)


def test_1f1b_is_as_published() -> None:
    schedule = build_schedule("1f1b", stages=3, microbatches=4)
    letters = ["".join(f"{kind[0]}{m}" for kind, m, _ in schedule.of_stage(stage)) for stage in range(3)]
    assert letters == ["f0f1f2b0f3b1b2b3", "f0f1b0f2b1f3b2b3", "f0b0f1b1f2b2f3b3"]


def test_recomputation_precedes_each_backward_except_on_the_last_stage() -> None:
    schedule = build_schedule("EarlyRecompute1F1B", stages=2, microbatches=2)
    assert schedule.of_stage(0) == [
        ("forward", 0, 0),
        ("forward", 1, 0),
        ("forward", 0, 1),
        ("backward", 0, 0),
        ("forward", 1, 1),
        ("backward", 1, 0),
    ]
    assert {chunk for _, _, chunk in schedule.of_stage(1)} == {0}


def test_constants_precede_each_forward_of_the_first_chunk() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=2, constants=(0,))
    assert schedule.of_stage(0)[:4] == [("constant", 0, 0), ("forward", 0, 0), ("constant", 1, 0), ("forward", 1, 0)]
    assert all(kind != "constant" for kind, _, _ in schedule.of_stage(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "2f2b"},
            "schedule '2f2b' is unknown; known are 1F1B, DualPipe, EarlyRecompute1F1B, GPipe, Interleaved",
        ),
        ({"stages": 0}, "stages must be at least 1, not 0"),
        ({"microbatches": -3}, "microbatches must be at least 1, not -3"),
        ({"stages": 5000}, "stages must be at most 1,024, not 5,000"),
        ({"microbatches": 10**9}, "at most 4,000,000 forwards and backwards are supported"),
        ({"chunks": 0}, "chunks must be at least 1, not 0"),
        ({"chunks": 2}, "chunks must be 1 for 1F1B, not 2"),
        ({"name": "Interleaved1F1B"}, "Interleaved1F1B needs chunks of 2 or more"),
        ({"name": "Interleaved1F1B", "chunks": 2, "microbatches": 9}, "9 is not a multiple of 2"),
        ({"name": "DualPipe", "stages": 3}, "DualPipe needs an even number of stages, not 3"),
        ({"name": "DualPipe", "microbatches": 6}, "at least 2 × stages = 8, not 6"),
        ({"constants": (9,)}, "constants must be stages 0 … 3, not [9]"),
    ],
)
def test_bad_counts_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    given = {"name": "1f1b", "stages": 4, "microbatches": 8} | arguments
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        build_schedule(**given)  # type: ignore[arg-type]


# As torch.distributed.pipelining writes them: two ranks, two chunks each, two microbatches.
COMPUTE_ONLY = "0F0,0F1,2F0,2F1,,,2B0,2B1,0B0,,0B1\n,1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1,,\n"
WITH_COMMUNICATION = (
    "0UNSHARD,2UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,"
    "2RECV_B1,2B1,2SEND_B1,2REDUCE_GRAD,2RESHARD,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,(3B0;3F1)OVERLAP_F_B,3SEND_B0,3RECV_F1,3B1,"
    "3SEND_B1,1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1,1REDUCE_GRAD\n"
)


def test_both_forms_of_torch_csv_give_the_same_schedule() -> None:
    plain, full = read_schedule(COMPUTE_ONLY), read_schedule(WITH_COMMUNICATION.encode())
    assert plain.position.tolist() == [[0, 2], [1, 3]]
    assert plain.of_stage(0) == full.of_stage(0)
    assert plain.of_stage(1) == full.of_stage(1)
    assert full.of_stage(1)[2:5] == [("forward", 0, 1), ("backward", 0, 1), ("forward", 1, 1)]


def test_a_spreadsheet_s_byte_order_mark_is_no_part_of_a_cell() -> None:
    """Source: pytorch/pytorch pull request 129264, by which schedules are edited in a spreadsheet and loaded again."""
    for text in ("\ufeff0F0,0B0\n", b"\xef\xbb\xbf0F0,0B0\r\n"):
        assert read_schedule(text).of_stage(0) == [("forward", 0, 0), ("backward", 0, 0)]


def test_letters_of_torch_before_2_6_are_read() -> None:
    """B beside W was the input gradient; B alone was, and is, the whole backward.

    Source: ``zb1p_2rank_2stagep_compute.csv`` of pytorch/pytorch at commit 15380b18, before pull request 138886.
    """
    old = read_schedule("0F0,0F1,0B0,0B1,0W1\n1F0,1B0,1W0,1F1,1B1,1W1\n")
    assert write_schedule(old) == "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


PAIRED = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"


def csv_length(text: str, constants: tuple[int, ...] = ()) -> float:
    """Iteration time when a forward and loading take one second each, and a backward two."""
    schedule = with_constants(read_schedule(text), constants)
    rows = UNIT + "".join(f"{stage},constant,0,1,1\n" for stage in constants)
    problem = build_problem(read_profile(rows, stages=schedule.stages), schedule, blocking_power_w=0)
    return float(Simulator(problem).run(np.zeros(problem.instructions, dtype=int)).iteration_time_s)


def test_an_overlapped_pair_receives_before_and_sends_after_both_parts() -> None:
    """``OVERLAP_F_B`` of torch's DualPipeV, whose sends follow the whole action.

    Source: ``test/distributed/pipelining/artifacts/dualpipev_4rank_10mb.csv`` and ``_add_send_recv`` of
    pytorch/pytorch (pull request 159591); pytorch/torchtitan issue 1682.
    """
    # stage 0: F0 0–1; the pair waits for the gradient of stage 1, 4–7; then stage 1 has microbatch 1, 7–10; B1 10–12
    assert csv_length(PAIRED) == 12
    assert csv_length(PAIRED.replace("(0F1;0B0)OVERLAP_F_B", "0F1,0B0")) == 9


def test_loading_inside_a_pair_is_a_part_of_it() -> None:
    # stage 0: loads and F0 0–2; B0, loading and F1 5–9; then stage 1 has microbatch 1, 9–12; B1 12–14
    assert csv_length(PAIRED.replace("0F1;0B0", "0B0;0F1"), constants=(0,)) == 14


def test_overlapped_pairs_round_trip_through_torch_csv() -> None:
    schedule = read_schedule(PAIRED)
    assert schedule.joined.tolist() == [False, True, False, False, *[False] * 4]
    assert write_schedule(schedule) == PAIRED


def test_a_pair_that_waits_for_its_own_result_deadlocks() -> None:
    with pytest.raises(InvalidSchedule, match=r"the schedule deadlocks: .* waits for "):
        read_schedule("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n")


def test_split_backwards_and_unequal_chunks_are_read() -> None:
    order = read_schedule("0F0,2F0,2I0,2W0,0B0\n1F0,1I0,1W0\n")
    assert order.position.tolist() == [[0, 2], [1, -1]]
    assert order.of_stage(1) == [("forward", 0, 0), ("input_gradient", 0, 0), ("weight_gradient", 0, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schedule CSV is empty"),
        (",,\n", "schedule CSV is empty"),
        ("0F0,0B0\n,,\n1F0,1B0\n", "schedule CSV row 2: the rank runs nothing"),
        ("0F0,zero\n", "schedule CSV row 1, cell 2: 'zero' is not an action such as 0F0 or 2I1"),
        ("0F0,0X0\n", "schedule CSV row 1, cell 2: '0X0' is not an action"),
        ("0F,0B0\n", "schedule CSV row 1, cell 1: '0F' is not an action"),
        ("0F0,(0F1;0F2\n", "schedule CSV row 1, cell 2: '(0F1;0F2' is not an action"),
        ("0F0,0B0\n0F1,0B1\n", "schedule CSV: virtual stage 0 is on more than one rank"),
        ("0F0,0B0\n2F0,2B0\n", "schedule CSV: virtual stage 1 is on no rank, but 2 is"),
        ("0F0\n", "custom: no backward or input_gradient of microbatch 0 for stage 0"),
        ("0F0,0B0,0F2,0B2\n", "custom: no forward of microbatch 1 for stage 0"),
        ("0F0,0I0\n", "custom: no weight_gradient of microbatch 0 for stage 0"),
        ("0F0,0F1,0I1,0W1,0B0,0W0\n", "custom: no input_gradient of microbatch 0 for stage 0"),
        ("0F0,0F0,0B0\n", "custom: forward 0 on stage 0 runs more than once"),
        (
            "0B0,0F0\n",
            "the schedule deadlocks: backward 0 on stage 0 runs before forward 0 on stage 0, whose result it needs",
        ),
        ('0F0,"0B0\n', "schedule CSV cannot be parsed"),
        (b"\xff\xfe\xff", "schedule CSV is not UTF-8 text"),
    ],
)
def test_bad_schedule_csv_is_refused_by_row_and_cell(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        read_schedule(text)


def test_a_deadlock_names_the_instructions_of_its_cycle() -> None:
    # Stage 0 will not start microbatch 1 before it has microbatch 0's gradient; stage 1 wants microbatch 1 first.
    with pytest.raises(InvalidSchedule) as refusal:
        read_schedule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    for instruction in (
        "backward 0 on stage 0",
        "forward 1 on stage 0",
        "forward 1 on stage 1",
        "backward 0 on stage 1",
    ):
        assert instruction in str(refusal.value)
    assert "backward 1" not in str(refusal.value)  # behind the cycle, not in it


def test_long_cycles_are_shortened() -> None:
    stages = 40
    first = "0F0,0B0,0F1,0B1\n"
    rest = "".join(f"{s}F0,{s}F1,{s}B0,{s}B1\n" for s in range(1, stages))
    with pytest.raises(InvalidSchedule, match=r"deadlocks.*more") as refusal:
        read_schedule(first + rest)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("name", [n for n in PIPELINES if n not in {"DualPipe", "EarlyRecompute1F1B"}])
def test_named_schedules_round_trip_through_torch_csv(name: str) -> None:
    schedule = build_schedule(name, stages=4, microbatches=8, chunks=2 if name == "Interleaved1F1B" else None)
    again = read_schedule(write_schedule(schedule))
    assert (again.position == schedule.position).all()
    for stage in range(4):
        assert again.of_stage(stage) == schedule.of_stage(stage)


STEPS = """stage,instruction,frequency,time,energy
0,step,1400,1.0,400
0,step,1200,1.1,330
0,step,1000,1.3,300
"""


def test_a_step_is_a_pipeline_of_one_instruction() -> None:
    schedule = build_schedule("steps", stages=1, microbatches=1)
    assert schedule.of_stage(0) == [("step", 0, 0)]
    problem = build_problem(read_profile(STEPS), schedule, blocking_power_w=80)
    frontier = solve_frontier(problem)
    assert list(zip(frontier.time_s, frontier.energy_j, strict=True)) == [(1.0, 400.0), (1.1, 330.0), (1.3, 300.0)]
    assert (frontier.gap < 1e-6).all()
    for stages, microbatches in ((2, 1), (1, 4)):
        with pytest.raises(InvalidSchedule, match="Steps has 1 stage and 1 microbatch"):
            build_schedule("Steps", stages=stages, microbatches=microbatches)
    assert write_schedule(schedule) == "0S0\n"


PHASES = """stage,instruction,chunk,frequency,time,energy
0,step,0,1400,1.0,300
0,step,0,1000,1.05,200
0,step,1,1400,1.0,400
0,step,1,1000,1.4,380
"""


def test_phases_of_a_step_run_one_after_the_other_each_at_its_clock() -> None:
    schedule = read_schedule("0S0,1S0\n")
    assert schedule.of_stage(0) == [("step", 0, 0), ("step", 0, 1)]
    problem = build_problem(read_profile(PHASES), schedule, blocking_power_w=80)
    frontier = solve_frontier(problem)
    # The phase that loses the least time goes first.
    assert frontier.time_s.tolist() == pytest.approx([2.0, 2.05, 2.45])
    assert frontier.energy_j.tolist() == pytest.approx([700.0, 600.0, 580.0])


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("0S0,1S0,1S0\n", "step 0 of chunk 1 on stage 0 runs more than once"),
        ("0S0\n1S0\n", "steps are those of one stage"),
        ("0S0,1F0,1B0\n", "there is nothing else beside them"),
    ],
)
def test_phases_are_those_of_one_stage_and_each_runs_once(order: str, says: str) -> None:
    with pytest.raises(InvalidSchedule, match=says):
        read_schedule(order)


def test_a_profile_has_steps_or_parts_of_them() -> None:
    with pytest.raises(InvalidProfile, match="stage 0 has 'forward' rows beside 'step' rows"):
        read_profile(STEPS + "0,forward,1400,0.3,100\n")


@pytest.mark.parametrize("name", ["DualPipe", "EarlyRecompute1F1B"])
def test_schedules_without_torch_actions_are_not_written(name: str) -> None:
    with pytest.raises(InvalidSchedule, match="torch's CSV has no cell for"):
        write_schedule(build_schedule(name, stages=2, microbatches=4))


def test_wire_names_and_numbers_are_those_of_the_protocol() -> None:
    from perseus_proto.v1alpha1 import agent_pb2

    wire = agent_pb2.InstructionKind.items()
    assert {f"INSTRUCTION_KIND_{kind.name}": int(kind) for kind in InstructionKind} == {n: v for n, v in wire if v}

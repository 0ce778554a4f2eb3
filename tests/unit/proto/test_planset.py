"""Plan sets: what is encoded comes back, and nothing else is accepted."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_core.clock_latency import MAX_CLOCK_MHZ
from perseus_proto import planset
from perseus_proto.planset import (
    InvalidPlanSet,
    PlanPoint,
    StageSchedule,
    decode_changes,
    decode_plan_set,
    encode_plan_set,
)
from perseus_proto.v1alpha1 import agent_pb2 as messages


def stage_of(number: int, instructions: int) -> StageSchedule:
    order = range(instructions)
    return StageSchedule(
        number, tuple(1 + i % 5 for i in order), tuple(i // 2 for i in order), tuple(i % 3 for i in order)
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[StageSchedule], list[PlanPoint], list[list[list[int]]]]:
    widths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    points = draw(st.integers(1, 6))
    clocks = st.integers(1, MAX_CLOCK_MHZ)
    palette = draw(st.lists(clocks, min_size=1, max_size=8))
    pick = random.Random(draw(st.integers()))
    times = sorted(draw(st.lists(st.integers(1, 2**40), min_size=points, max_size=points)))
    return (
        [stage_of(3 * number, width) for number, width in enumerate(widths)],
        [PlanPoint(time, draw(st.integers(0, 2**40))) for time in times],
        [[[pick.choice(palette) for _ in range(width)] for _ in range(points)] for width in widths],
    )


@given(plans())
@settings(max_examples=60, deadline=None)
def test_what_is_encoded_comes_back(plan: tuple[list[StageSchedule], list[PlanPoint], list[list[list[int]]]]) -> None:
    schedules, points, clocks = plan
    decoded = decode_plan_set(messages.PlanSet.FromString(encode_plan_set(*plan).SerializeToString()))
    assert list(decoded.schedules.values()) == schedules
    assert list(decoded.points) == points
    for stage, rows in zip(schedules, clocks, strict=True):
        assert [list(decoded.stage_clocks_mhz(stage.stage, point)) for point in range(len(points))] == rows


def small() -> messages.PlanSet:
    points = [PlanPoint(10, 9), PlanPoint(11, 8)]
    return encode_plan_set([stage_of(0, 3), stage_of(1, 2)], points, [[[600, 900, 600]] * 2, [[900, 900]] * 2])


def test_the_identity_is_of_the_content_and_not_of_its_packing() -> None:
    message = small()
    repacked = small()
    repacked.clock_indices = zlib.compress(zlib.decompress(message.clock_indices), 0)
    assert repacked.clock_indices != message.clock_indices
    assert decode_plan_set(repacked).plan_id == message.plan_id


def set_field(path: str, value: object) -> messages.PlanSet:
    message = small()
    target: object = message
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent.partition("[")[0])
        if "[" in parent:
            target = target[int(parent[-2])]  # type: ignore[index]
    if isinstance(value, list):
        del getattr(target, name)[:]
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)
    return message


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("plan_id", "0" * 64, "plan_id: is not the digest"),
        ("stages", [], "stages: 0 stages"),
        ("points", [], "points: 0 points"),
        ("clocks_mhz", [], "clocks_mhz: 0 clocks"),
        ("clocks_mhz", [900, 600], "must ascend strictly"),
        ("clocks_mhz", [0, 600], "must ascend strictly within 1"),
        ("clocks_mhz", [600, 2**31], "must ascend strictly within 1"),
        ("clocks_mhz", list(range(1, 258)), "257 clocks; must be 1 to 255"),
        ("clocks_mhz", [600], "index beyond the 1 clocks"),
        ("clocks_mhz", [600, 901], "plan_id: is not the digest"),
        ("stages[0].kinds", [1, 2], "equally long"),
        ("stages[0].kinds", [1, 2, 0], "no InstructionKind"),
        ("stages[0].kinds", [1, 2, 77], "no InstructionKind"),
        ("stages[0].kinds", [], "0 instructions"),
        ("stages[1].stage", 0, "stage numbers must ascend"),
        ("stages[1].microbatches", [5, 5], "plan_id: is not the digest"),
        ("points[0].iteration_time_us", 12, "must not decrease"),
        ("points[0].iteration_time_us", 0, "must be positive"),
        ("points[0].energy_mj", 1, "plan_id: is not the digest"),
        ("clock_indices", b"", "must unpack to exactly 10 bytes"),
        ("clock_indices", b"nonsense", "not zlib data"),
        ("clock_indices", zlib.compress(bytes(9)), "must unpack to exactly 10 bytes"),
        ("clock_indices", zlib.compress(bytes(11)), "must unpack to exactly 10 bytes"),
        ("clock_indices", zlib.compress(bytes(10)) + b"more", "must unpack to exactly 10 bytes"),
        ("clock_indices", zlib.compress(bytes(1 << 24)), "must unpack to exactly 10 bytes"),
    ],
)
def test_every_rule_refuses_the_whole_and_says_which(path: str, value: object, rule: str) -> None:
    with pytest.raises(InvalidPlanSet, match=rule.replace("[", r"\[")):
        decode_plan_set(set_field(path, value))


def test_sizes_are_bounded_before_memory_is_taken() -> None:
    message = small()
    width = planset.MAX_INSTRUCTIONS
    message.stages.add(stage=2, kinds=[1] * width, microbatches=[0] * width, chunks=[0] * width)
    message.points.extend([messages.PlanPoint(iteration_time_us=12)] * (planset.MAX_CELLS // width))
    with pytest.raises(InvalidPlanSet, match="clocks in all"):
        decode_plan_set(message)


@pytest.mark.parametrize(("count", "points", "width"), [(1, 4_000, 1), (64, 40, 8), (2, 3, 20_000)])
def test_the_memory_of_a_plan_set_is_known(count: int, points: int, width: int) -> None:
    """Of many short rows, which are mostly overhead, of many points, and of long schedules."""
    schedules = [stage_of(stage, width) for stage in range(count)]
    row = [600, 900][: min(width, 2)] + [600] * (width - 2)
    message = encode_plan_set(schedules, [PlanPoint(10_000 + n, 9) for n in range(points)], [[row] * points] * count)
    decode_plan_set(message)
    tracemalloc.start()
    decoded = decode_plan_set(message)
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 * taken_bytes <= decoded.memory_bytes <= 3 * taken_bytes


def test_encoding_refuses_shapes_that_do_not_fit() -> None:
    points = [PlanPoint(10, 9)]
    for clocks, rule in [
        ([], "0 stages, but schedules has 1"),
        ([[[600, 600]]], "want 1 points of 3 instructions"),
        ([[[600] * 3] * 2], "want 1 points of 3 instructions"),
        ([[[600, 600, 20_000]]], "within 1 to 10000"),
    ]:
        with pytest.raises(InvalidPlanSet, match=rule):
            encode_plan_set([stage_of(0, 3)], points, clocks)


def change(clock_mhz: int = 900, p50_us: int = 20_000, p99_us: int = 50_000) -> messages.ClockChange:
    return messages.ClockChange(clock_mhz=clock_mhz, p50_us=p50_us, p99_us=p99_us)


@given(st.dictionaries(st.integers(1, 10_000), st.tuples(*[st.integers(1, 60_000_000)] * 2), max_size=255))
def test_latencies_of_changes_are_read_by_clock(latencies: dict[int, tuple[int, int]]) -> None:
    sent = [change(mhz, *sorted(latencies[mhz])) for mhz in sorted(latencies)]
    found = decode_changes(sent)
    assert list(found) == [one.clock_mhz for one in sent]
    for one, latency in zip(sent, found.values(), strict=True):
        assert (round(1e6 * latency.p50_s), round(1e6 * latency.p99_s)) == (one.p50_us, one.p99_us)
        assert (latency.call_s, latency.shared_lock, latency.source) == (0.0, False, "sent with the plan")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ([change(mhz) for mhz in range(1, 257)], "changes: 256 clocks; must be at most 255"),
        ([change(0)], r"changes\.clock_mhz: must ascend strictly within 1 to 10000"),
        ([change(10_001)], r"changes\.clock_mhz: must ascend strictly within 1 to 10000"),
        ([change(900), change(900)], r"changes\.clock_mhz: must ascend strictly"),
        ([change(900), change(885)], r"changes\.clock_mhz: must ascend strictly"),
        ([change(885), change(900, p50_us=0)], r"changes\[900\]: p50_us must be at least 1"),
        ([change(p50_us=50_001)], r"changes\[900\]: .*p99_us at least p50_us .*not 50001 and 50000"),
        ([change(p99_us=60_000_001)], r"changes\[900\]: .*at most 60000000"),
    ],
)
def test_latencies_that_break_a_rule_are_refused_by_name(changes: list[messages.ClockChange], rule: str) -> None:
    with pytest.raises(InvalidPlanSet, match=rule):
        decode_changes(changes)

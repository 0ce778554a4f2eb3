"""The paper's set_straggler as an annotation: its grammar, how it is rewritten, and when it takes effect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.features.stragglers.annotation import Declaration, declare, parse_annotation
from perseus_operator.families.training.features.stragglers.declared import declared_slowdowns
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.objects.values import JobRef


def test_the_annotation() -> None:
    assert parse_annotation("") == ()
    assert parse_annotation(" 1:0:1.2, GPU-ab-12:2.5:3 ") == (
        Declaration("1", 0.0, 1.2),
        Declaration("GPU-ab-12", 2.5, 3.0),
    )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1", "must be <data-parallel rank or GPU UUID>:<delay seconds>:<slowdown>, such as 1:0:1.2, not '1'"),
        ("1:0", "such as 1:0:1.2"),
        ("1:0:1.2:9", "such as 1:0:1.2"),
        ("-1:0:1.2", "such as 1:0:1.2"),
        ("1:-3:1.2", "such as 1:0:1.2"),
        ("1:0:nan", "such as 1:0:1.2"),
        ("1:0:0.9", "slowdown must be from 1 (back to normal) to 100, not 0.9"),
        ("1:0:101", "slowdown must be from 1 (back to normal) to 100, not 101"),
        ("1:0:1.2,x", "not 'x'"),
    ],
)
def test_a_wrong_annotation_is_named(text: str, rule: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_annotation(text)
    assert str(refused.value).startswith("annotation perseus.energy/straggler: ")
    assert rule in str(refused.value)


def state_of(text: str, now_s: float) -> Training:
    state = Training(PerseusJob(JobRef("ns", "job", "uid")))
    state.stragglers.declarations_observed(parse_annotation(text), now_s=now_s)
    return state


def test_declared_slowdowns_start_after_their_delay_and_end_with_slowdown_one() -> None:
    def declared(text: str, now_s: float) -> dict[int, float]:
        stragglers = state_of(text, 10).stragglers.declared
        return declared_slowdowns(stragglers, now_s=now_s, dp_of_gpu={"GPU-a": 3}, pipelines=4)

    assert declared("1:5:1.2", 14.9) == {}
    assert declared("1:5:1.2", 15.0) == {1: 1.2}
    assert declared("1:0:1", 15.0) == {}
    assert declared("1:0:1.2,1:0:1.4,GPU-a:0:2,GPU-b:0:2,4:0:2", 15.0) == {1: 1.4, 3: 2.0}


def test_editing_one_entry_does_not_restart_the_delay_of_another() -> None:
    state = state_of("1:30:1.2", 100.0)
    state.stragglers.declarations_observed(parse_annotation("1:30:1.2,2:5:1.1"), now_s=120.0)
    assert [straggler.from_s for straggler in state.stragglers.declared] == [130.0, 125.0]
    state.stragglers.declarations_observed(parse_annotation("1:30:1.3"), now_s=140.0)
    assert [straggler.from_s for straggler in state.stragglers.declared] == [170.0]


def test_a_declaration_replaces_the_one_with_its_id_and_slowdown_one_removes_it() -> None:
    text = declare("", Declaration("1", 0.0, 1.2))
    assert text == "1:0:1.2"
    text = declare(text, Declaration("GPU-a", 2.5, 3.0))
    assert text == "1:0:1.2,GPU-a:2.5:3"
    text = declare(text, Declaration("1", 10.0, 1.125))
    assert text == "GPU-a:2.5:3,1:10:1.125"
    assert declare(text, Declaration("GPU-a", 0.0, 1.0)) == "1:10:1.125"
    assert declare("", Declaration("7", 0.0, 1.0)) == "", "it was none"


@pytest.mark.parametrize(
    ("text", "entry", "rule"),
    [
        ("", Declaration("x", 0.0, 1.2), "must be <data-parallel rank or GPU UUID>"),
        ("", Declaration("", 0.0, 1.2), "must be <data-parallel rank or GPU UUID>"),
        ("", Declaration("1:0:1.2,2", 0.0, 1.2), "must be one entry, not '1:0:1.2,2:0:1.2'"),
        ("", Declaration("1", -1.0, 1.2), "such as 1:0:1.2, not '1:-1:1.2'"),
        ("", Declaration("1", float("inf"), 1.2), "such as 1:0:1.2, not '1:inf:1.2'"),
        ("", Declaration("1", 0.0, 0.5), "slowdown must be from 1 (back to normal) to 100, not 0.5"),
        ("", Declaration("1", 0.0, 1e9), "such as 1:0:1.2"),
        ("zero", Declaration("1", 0.0, 1.2), "not 'zero'"),
        (
            ",".join(f"{n}:0:1.2" for n in range(256)),
            Declaration("GPU-x", 0.0, 1.2),
            "must have at most 256 entries, not 257",
        ),
    ],
)
def test_what_breaks_the_grammar_is_never_written(text: str, entry: Declaration, rule: str) -> None:
    with pytest.raises(InvalidSpec, match=r"annotation perseus\.energy/straggler: ") as refused:
        declare(text, entry)
    assert rule in str(refused.value)


entries = st.builds(
    Declaration,
    st.one_of(st.integers(0, 9).map(str), st.sampled_from(["GPU-a", "GPU-b"])),
    st.integers(0, 10**9).map(lambda us: us / 1e3),
    st.integers(10**6, 10**8).map(lambda ppm: ppm / 1e6),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(entries, max_size=12))
def test_the_last_declaration_of_each_id_is_what_is_read(declarations: list[Declaration]) -> None:
    text = ""
    for entry in declarations:
        text = declare(text, entry)
    last = {entry.id: entry for entry in declarations}
    assert {entry.id: entry for entry in parse_annotation(text)} == {i: e for i, e in last.items() if e.slowdown > 1.0}

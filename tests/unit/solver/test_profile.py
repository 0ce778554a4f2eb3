"""Every bad profile has one message that names the place and the rule; every harmless oddity is read."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProfile
from perseus_solver.model.profile import MAX_ROWS, read_profile
from perseus_solver.model.sampling import Sampling

HEADER = "stage,instruction,frequency,time,energy\n"
GOOD = HEADER + (
    "0,forward,1410,0.05,20\n0,forward,1200,0.06,17\n0,backward,1410,0.10,40\n0,backward,1200,0.12,35\n"
    "1,forward,1410,0.04,18\n1,backward,1410,0.09,36\n"
)


def test_reads_options_by_descending_frequency() -> None:
    profile = read_profile(HEADER + "0,forward,1200,0.06,17\n0,forward,1410,0.05,20\n0,backward,900,0.2,1\n")
    table = profile.tables[0, InstructionKind.FORWARD, 0]
    assert table.frequency_mhz.tolist() == [1410, 1200]
    assert table.time_s.tolist() == [0.05, 0.06]
    assert table.energy_j.tolist() == [20, 17]
    assert profile.stages == 1
    assert not profile.has_chunks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "profile is empty; the first line must name the columns stage,instruction,frequency,time,energy"),
        ("\n \n", "profile is empty"),
        (HEADER, "profile has a header but no rows"),
        ("stage,instruction,frequency,time\n0,forward,1,1\n", "profile has no column 'energy'"),
        ("stage,instruction,frequency,time,energy,time\n", "profile has the column 'time' twice"),
        ("profile.csv", "to read a file pass its path"),
        ("just some words\nand more\n", "profile has no column 'stage'"),
        (
            GOOD + "1,sideways,1410,1,1\n",
            "profile line 8, column 'instruction': 'sideways' is unknown; known are forward,",
        ),
        (GOOD + "1,forward,1200,-1,1\n", "profile line 8, column 'time': '-1' must be finite and greater than zero"),
        (GOOD + "1,forward,1200,0,1\n", "profile line 8, column 'time': '0' must be finite and greater than zero"),
        (
            GOOD + "1,forward,1200,1,nan\n",
            "profile line 8, column 'energy': 'nan' must be finite and greater than zero",
        ),
        (GOOD + "1,forward,1200,inf,1\n", "profile line 8, column 'time': 'inf' must be finite and greater than zero"),
        (GOOD + "1,forward,1200,1e999,1\n", "profile line 8, column 'time': '1e999' must be finite"),
        (GOOD + "1,forward,1200,1e-30,1\n", "profile line 8, column 'time': '1e-30' must be between 1e-09 and 1e+09 s"),
        (GOOD + "1,forward,1200,fast,1\n", "profile line 8, column 'time': 'fast' is not a number"),
        (GOOD + "1,forward,1200,1_0,1\n", "profile line 8, column 'time': '1_0' is not a number"),
        (GOOD + "1,forward,1200,,1\n", "profile line 8, column 'time': is empty"),
        (
            GOOD + "1,forward,0,1,1\n",
            "profile line 8, column 'frequency': '0' must be a whole number between 1 and 65535",
        ),
        (GOOD + "1,forward,1200.5,1,1\n", "profile line 8, column 'frequency': '1200.5' must be a whole number"),
        (GOOD + "1,forward,nan,1,1\n", "profile line 8, column 'frequency': 'nan' must be a whole number"),
        (GOOD + "-1,forward,1200,1,1\n", "profile line 8, column 'stage': '-1' must be a whole number between 0 and"),
        (GOOD + "1,forward,1200,1\n", "profile line 8: 4 cells, but the header has 5"),
        (GOOD + '1,"forward,1200,1,1\n', "profile line 8: cannot be parsed as CSV"),
        (
            GOOD + "1,forward,1410,1,1\n",
            "profile line 8: duplicate row: stage 1, forward, 1410 MHz is already on line 6",
        ),
        (GOOD + "3,forward,1410,1,1\n3,backward,1410,1,1\n", "profile has no rows for stage 2 of 0 … 3"),
        (GOOD + "2,backward,1410,1,1\n", "profile: stage 2 has no 'forward' rows"),
        (GOOD + "2,forward,1410,1,1\n", "profile: stage 2 has no 'backward' rows"),
        (
            GOOD + "2,forward,1410,1,1\n2,input_gradient,1410,1,1\n",
            "profile: stage 2 has 'input_gradient' rows but no 'weight_gradient' rows",
        ),
        (GOOD + "0,constant,1410,1,1\n", "profile line 8, column 'frequency': must be 0 for a constant instruction"),
        (b"\x1f\x8b\x08\x00\x00\x00", "profile is not a text file: it has NUL bytes"),
        (GOOD.encode("utf-16"), "profile is not a text file: it has NUL bytes"),
        (HEADER.encode() + b"0,forw\xe4rd,1,1,1\n", "profile line 2: not UTF-8 text (byte 0xe4)"),
    ],
)
def test_refuses_with_one_clear_line(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidProfile, match=re.escape(message)) as refusal:
        read_profile(text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "oddity",
    [
        GOOD.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.rstrip("\n"),
        GOOD.replace("\n", "\n\n"),
        GOOD.replace(",", " , "),
        GOOD.replace("1410", "1410.0"),
        GOOD.replace("forward", "Forward").replace("stage", "Stage"),
        "\n".join(line + ",note" for line in GOOD.splitlines()),
        "\n".join(",".join(line.split(",")[::-1]) for line in GOOD.splitlines()),
    ],
    ids=["crlf", "bom", "no last newline", "blank lines", "spaces", "float clocks", "case", "extra column", "order"],
)
def test_reads_what_people_really_write(oddity: str | bytes) -> None:
    expected, found = read_profile(GOOD), read_profile(oddity)
    assert found.tables.keys() == expected.tables.keys()
    for key, table in expected.tables.items():
        assert (found.tables[key].frequency_mhz == table.frequency_mhz).all()
        assert (found.tables[key].time_s == table.time_s).all()
        assert (found.tables[key].energy_j == table.energy_j).all()


def test_loading_as_the_artifact_writes_it_is_one_constant_instruction() -> None:
    """Source: the post-processing script of the SOSP'24 artifact, which writes ``batch_input`` as ``load``."""
    profile = read_profile(GOOD + "0,load,1410,0.002,0.2\n0,load,1200,0.004,0.4\n1,load,1410,0.003,0.3\n")
    assert profile.constant_stages == (0, 1)
    table = profile.tables[0, InstructionKind.CONSTANT, 0]
    assert [table.frequency_mhz.tolist(), table.time_s.tolist(), table.energy_j.tolist()] == [
        [0],
        [pytest.approx(0.003)],
        [pytest.approx(0.3)],
    ]
    assert profile.notes == (
        "stage 0: 2 rows of 'load' are read as one constant instruction, their mean",
        "stage 1: 1 rows of 'load' are read as one constant instruction, their mean",
    )
    with pytest.raises(InvalidProfile, match="duplicate row: stage 0, constant, 0 MHz"):
        read_profile(GOOD + "0,constant,0,0.002,0.2\n0,load,1200,0.004,0.4\n")


def test_fewer_stages_than_asked_is_refused_and_more_are_left_out_aloud() -> None:
    with pytest.raises(InvalidProfile, match=r"profile has 2 stages \(0 … 1\), but 3 are needed"):
        read_profile(GOOD, stages=3)
    profile = read_profile(GOOD, stages=1)
    assert {stage for stage, _, _ in profile.tables} == {0}
    assert profile.notes == ("the profile has 2 stages; the first 1 are used",)


def test_a_million_rows_are_refused_at_once_with_the_limit() -> None:
    text = HEADER + "0,forward,1410,0.05,20\n" * 1_000_000
    begin = time.process_time()
    with pytest.raises(InvalidProfile, match=f"too large: at most {MAX_ROWS:,} rows"):
        read_profile(text)
    assert time.process_time() - begin < 5  # measured: 10 ms


def test_files_are_paths(tmp_path: Path) -> None:
    file = tmp_path / "profile.csv"
    file.write_text(GOOD)
    assert read_profile(file).stages == 2
    with pytest.raises(InvalidProfile, match=r"absent\.csv cannot be read: No such file"):
        read_profile(tmp_path / "absent.csv")
    with pytest.raises(InvalidProfile, match="cannot be read: Is a directory"):
        read_profile(tmp_path)


def test_chunks_have_rows_of_their_own() -> None:
    text = "stage,instruction,frequency,time,energy,chunk\n" + "".join(
        f"0,{what},1410,{chunk + 1},1,{chunk}\n" for what in ("forward", "backward") for chunk in (0, 1)
    )
    profile = read_profile(text)
    assert profile.has_chunks
    assert profile.tables[0, InstructionKind.FORWARD, 1].time_s.tolist() == [2]


SAMPLED = HEADER + "".join(
    f"0,{what},{clock},{base * (1 + noise)},{10 * (1 + noise)}\n"
    for what in ("forward", "backward")
    for clock, base in ((1400, 1.0), (1300, 0.99), (1200, 1.2))
    for noise in (-0.02, 0.0, 0.01)
)


def test_samples_become_medians_with_a_guard_band_on_time_alone() -> None:
    bare = read_profile(SAMPLED, sampling=Sampling(guard=0)).tables[0, InstructionKind.FORWARD, 0]
    assert bare.time_s == pytest.approx([1.0, 0.99, 1.2])
    guarded_profile = read_profile(SAMPLED, sampling=Sampling())
    guarded = guarded_profile.tables[0, InstructionKind.FORWARD, 0]
    assert (guarded.time_s > bare.time_s).all()
    assert (guarded.energy_j == bare.energy_j).all()
    assert any("time raised by" in note for note in guarded_profile.notes)


def test_repair_only_raises_times_and_says_so() -> None:
    profile = read_profile(SAMPLED, sampling=Sampling(guard=0, repair_monotone=True))
    assert profile.tables[0, InstructionKind.FORWARD, 0].time_s == pytest.approx([1.0, 1.0, 1.2])
    assert any("1 of 3 times raised by up to 1 %" in note for note in profile.notes)


def test_single_samples_get_no_guard_band_and_a_note() -> None:
    profile = read_profile(GOOD, sampling=Sampling())
    assert profile.tables[0, InstructionKind.FORWARD, 0].time_s.tolist() == [0.05, 0.06]
    assert (
        "stage 0, forward: no clock has two samples that agree, so the spread is unknown and no guard band was added"
        in profile.notes
    )


@given(seed=st.integers(0, 2**32 - 1), samples=st.integers(3, 9))
def test_guard_band_makes_underestimates_rare(seed: int, samples: int) -> None:
    """Of 40 clocks with 1 % noise, the guarded median lies below the truth for few, the bare median for about half."""
    noise = np.random.default_rng(seed).normal(1, 0.01, (40, samples))
    text = (
        HEADER
        + "".join(f"0,forward,{1000 + k},{t},1\n" for k, row in enumerate(noise) for t in row)
        + "0,backward,1,1,1\n"
    )
    table = read_profile(text, sampling=Sampling(guard=3)).tables[0, InstructionKind.FORWARD, 0]
    assert np.count_nonzero(table.time_s < 1) <= 8  # a false alarm has probability below 1e-9 a run


@pytest.mark.parametrize("guard", [-1.0, float("nan"), float("inf")])
def test_guard_must_be_a_number_of_standard_errors(guard: float) -> None:
    with pytest.raises(ValueError, match="guard must be a finite number of standard errors"):
        Sampling(guard=guard)


def test_reads_the_published_measurements(sosp24: Path) -> None:
    for file, clocks in (("gpt3-175b_a100-sxm.csv", 38), ("bloom-176b_a40.csv", 60)):
        profile = read_profile(sosp24 / "stage_profile" / file, stages=8)
        assert profile.stages == 8
        assert all(table.frequency_mhz.size <= clocks for table in profile.tables.values())
        assert sum(table.frequency_mhz.size for table in profile.tables.values()) > 600


def reached(*clocks: tuple[int, str]) -> str:
    rows = [
        f"0,{kind},{mhz},{1400 / mhz},{mhz / 10},{text}" for kind in ("forward", "backward") for mhz, text in clocks
    ]
    return "stage,instruction,frequency,time,energy,reached\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("clocks", "left"),
    [
        ([(1980, "1335"), (1965, "1336.5"), (1350, "1335"), (1335, "1335"), (1320, "1320")], [1335, 1320]),
        ([(1980, "1335"), (1335, "1320"), (1320, "1320")], [1980, 1320]),  # the lower clock reaches less
        ([(1400, "1400"), (1385, "1385")], [1400, 1385]),
        ([(1400, ""), (1385, "")], [1400, 1385]),  # not measured: as set
        ([(1400, "1200"), (1300, "1290"), (1200, "1200")], [1300, 1200]),  # hot at the highest clock
    ],
)
def test_clocks_above_a_plateau_are_one_clock_the_lowest(clocks: list[tuple[int, str]], left: list[int]) -> None:
    profile = read_profile(reached(*clocks))
    for table in profile.tables.values():
        assert table.frequency_mhz.tolist() == left
        assert len(table.time_s) == len(table.energy_j) == len(left)
    assert bool(profile.notes) == (len(left) < len(clocks))


@pytest.mark.parametrize("text", ["0", "-5", "nan", "70000", "fast"])
def test_a_reached_clock_is_checked_by_line_and_column(text: str) -> None:
    with pytest.raises(InvalidProfile, match="line 3, column 'reached'"):
        read_profile(reached((1400, "1400"), (1385, text)))

"""Whatever is given as a profile or a schedule CSV, the answer is a value or one clear line, and it comes soon."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perseus_solver.errors import InvalidProfile, InvalidSchedule, SolverError
from perseus_solver.model.profile import read_profile
from perseus_solver.model.sampling import Sampling
from perseus_solver.schedules import read_schedule

Answer = TypeVar("Answer")

PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{s},{what},{f},0.5,20\n" for s in range(2) for what in ("forward", "backward") for f in (1400, 1300)
)
SCHEDULE_CSV = "0F0,0F1,2F0,2F1,,,2B0,2B1,0B0,,0B1\n,1F0,1F1,3F0,(3B0;3F1)OVERLAP_F_B,3B1,1B0,1B1,,\n"


def damaged(text: str) -> st.SearchStrategy[str]:
    """A few characters replaced, removed, doubled; lines cut, shuffled, repeated."""

    def damage(seed: int) -> str:
        rng = random.Random(seed)
        out = text
        for _ in range(rng.randint(1, 4)):
            a, b = sorted((rng.randrange(len(out) + 1), rng.randrange(len(out) + 1)))
            out = (
                rng.choice(
                    (
                        out[:a] + out[b:],
                        out[:b] + out[a:],
                        out[:a] + rng.choice('0123456789,-.eE"\n\r\tFBIWinfa;()\x00é\ufeff') + out[a:],
                        out[:a] + rng.choice(("99999", "1e308", "-0", "nan", "٣", "9999F9999999")) + out[a:],
                        "\n".join(rng.sample(out.split("\n"), len(out.split("\n")))),
                    )
                )
                or "x"
            )
        return out

    return st.integers(0, 2**31).map(damage)


def read_or_refused(read: Callable[[], Answer], refusal: type[SolverError]) -> Answer | None:
    """The value, or None after checking that the refusal is one clear line; any other error fails the test."""
    with contextlib.suppress(refusal):
        return read()
    with pytest.raises(refusal) as caught:
        read()
    assert 0 < len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
    return None


@settings(max_examples=300)
@given(st.one_of(damaged(PROFILE), damaged(PROFILE).map(str.encode), st.binary(max_size=200), st.text(max_size=200)))
@example("\ud800")
def test_profiles_are_read_or_refused(source: str | bytes) -> None:
    for sampling in (None, Sampling(repair_monotone=True)):
        profile = read_or_refused(lambda how=sampling: read_profile(source, sampling=how), InvalidProfile)  # type: ignore[misc]
        for table in profile.tables.values() if profile else ():
            assert (table.time_s > 0).all()
            assert (table.energy_j > 0).all()
            assert (table.frequency_mhz[1:] < table.frequency_mhz[:-1]).all()


@settings(max_examples=300)
@given(
    st.one_of(
        damaged(SCHEDULE_CSV), damaged(SCHEDULE_CSV).map(str.encode), st.binary(max_size=200), st.text(max_size=200)
    )
)
@example("9999F9999999\n")
@example("0F0,0B0,0F9999999,0B9999999\n")
def test_schedule_csvs_are_read_or_refused(source: str | bytes) -> None:
    schedule = read_or_refused(lambda: read_schedule(source), InvalidSchedule)
    if schedule:
        assert schedule.instructions >= 2 * schedule.microbatches

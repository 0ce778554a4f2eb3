"""Laws of the line of clocks that an agent asks for: nothing is too late, and it is the line that is rehearsed."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.clock_line import ClockLine
from perseus_agent.clocks.iteration_pattern import Pattern
from perseus_agent.clocks.lead import Earlier, Lead
from perseus_solver.rehearsal.control import Expected, Leads, requests

CLOCKS = 5
LONG = 1_000
"""Longer than any change takes."""


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Where clocks are right from, and which; the first and the last for long."""
    clocks = draw(st.lists(st.integers(1, CLOCKS), min_size=1, max_size=12))
    lengths = draw(st.lists(st.integers(1, 300), min_size=len(clocks), max_size=len(clocks)))
    wanted = [clock for clock, before in zip(clocks, [1, *clocks[:-1]], strict=True) if clock != before]
    starts = np.cumsum([LONG, *lengths])[: len(wanted)]
    return starts.tolist(), wanted


@st.composite
def leads(draw: st.DrawFn, *, deviation: bool) -> Lead:
    """Some clocks take longer or shorter than others, and scatter more or less."""
    turn = draw(st.integers(0, 50))
    common = Lead(
        draw(st.integers(0, 300)), draw(st.integers(0, 100)) if deviation else 0, turn + draw(st.integers(0, 50)), turn
    )
    clocks = {}
    for mhz in draw(st.sets(st.integers(1, CLOCKS))):
        median, scatter = draw(st.integers(0, 600)), draw(st.integers(0, 200)) if deviation else 0
        clocks[mhz] = Earlier(
            median + scatter - common.median_us - common.deviation_us,
            median - scatter - common.median_us + common.deviation_us,
        )
    return common._replace(clocks=clocks)


def line_of(starts: list[int], wanted: list[int]) -> ClockLine:
    line = ClockLine()
    line.add(-math.inf, 1)
    for start, clock in zip(starts, wanted, strict=True):
        line.add(start, clock)
    return line


@given(lines(), leads(deviation=False))
def test_no_clock_is_too_low_where_each_latency_is_known_exactly(
    planned: tuple[list[int], list[int]], lead: Lead
) -> None:
    """Changes come into effect in the order of their requests, as on a GPU; a slow one keeps a quick one waiting."""
    line = line_of(*planned)
    asked, _ = line.asked(lead, [])
    effect_us = np.maximum.accumulate(
        [at + lead.raise_us(mhz) for at, mhz in zip(asked._starts_us, asked._clocks_mhz, strict=True)]
    )
    for now in range(planned[0][-1] + 300 if planned[0] else 0):
        in_effect = asked._clocks_mhz[int(effect_us.searchsorted(now, side="right")) - 1]
        assert in_effect >= line.highest_mhz(now, now), now


@given(lines(), leads(deviation=True))
def test_the_agent_asks_for_what_is_rehearsed(planned: tuple[list[int], list[int]], lead: Lead) -> None:
    asked, _ = line_of(*planned).asked(lead, [])
    raise_us, lower_us = (
        np.array([float(of(mhz)) for mhz in range(CLOCKS + 1)]) for of in (lead.raise_us, lead.lower_us)
    )
    starts = np.array([-2.0 * LONG, *planned[0]])
    leads = Leads(raise_us, lower_us, float(lead.worth_us), float(lead.turn_us))
    at, clocks, _ = requests(starts, np.array([1, *planned[1]]), leads)
    assert clocks.tolist() == asked._clocks_mhz
    assert at[1:].tolist() == asked._starts_us[1:]


@st.composite
def iterations(draw: st.DrawFn) -> tuple[Pattern, list[int]]:
    """What repeats, and the clock of each instruction: of two, three or more, some with a wait before them."""
    clocks = draw(st.lists(st.integers(1, CLOCKS), min_size=2, max_size=8))
    lasts = st.lists(st.integers(1, 300), min_size=len(clocks), max_size=len(clocks))
    waits = st.lists(st.sampled_from([0, 0, 40, 200]), min_size=len(clocks), max_size=len(clocks))
    boundaries = np.cumsum(np.ravel(np.transpose([draw(lasts), draw(waits)])))
    pattern = Pattern()
    pattern.add([0, *boundaries[:-1].tolist()])
    pattern.add_period(int(boundaries[-1]) + draw(st.integers(0, 200)))
    return pattern, clocks


@given(iterations(), leads(deviation=True))
def test_the_agent_asks_in_each_iteration_for_what_is_rehearsed(planned: tuple[Pattern, list[int]], lead: Lead) -> None:
    """From one iteration to the next, too: gradients are reduced and applied in between."""
    (pattern, clocks), line, period = planned, ClockLine(), planned[0].period_us
    repeats = 2 * (2 + 2 * LONG // period)
    for iteration in range(repeats):
        line.draw(pattern, clocks, iteration * period, clocks[0])
    asked, _ = line.asked(lead, [])
    raise_us, lower_us = (
        np.array([float(of(mhz)) for mhz in range(CLOCKS + 1)]) for of in (lead.raise_us, lead.lower_us)
    )
    boundaries = np.array(pattern.offsets_us, dtype=float)
    expected = Expected(
        begin_s=boundaries[None, ::2].copy(),
        end_s=boundaries[None, 1::2].copy(),
        period_s=np.array([float(period)]),
        clock=np.array([clocks]),
        stage_offset=np.array([0, len(clocks)]),
        leads=Leads(raise_us, lower_us, float(lead.worth_us), float(lead.turn_us)),
        margin_s=np.zeros((1, len(clocks))),
    )
    begin = repeats // 2 * period
    at, rehearsed = expected.changes(0, 0, 0.0, float(period))
    for now in range(math.ceil(at[0]), period):
        wanted = rehearsed[at.searchsorted(now, side="right") - 1]
        assert asked.highest_mhz(begin + now, begin + now) == wanted, now

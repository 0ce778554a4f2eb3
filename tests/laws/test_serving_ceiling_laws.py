"""Laws of ceilings: more watts never carry less, every load that is carried keeps its limits, and none draws more."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.test_serving_model_laws import LADDER_MHZ, requests

from perseus_core.serving import DEFAULT_CLOCKS
from perseus_solver.errors import InvalidProblem
from perseus_solver.serving import Mix, TableRequest, ceilings
from perseus_solver.serving.table import PROMPT_SHARE, prompts_s

mixes = st.builds(Mix, st.floats(0.0, 8_000.0), st.floats(0.0, 20.0))
MOST_RUNNING = 256


def step_upper_s(request: TableRequest, mix: Mix, mhz: int, running: int) -> float:
    """The upper end of the interval of a step's time."""
    kv_tokens = min(running * mix.kv_tokens, request.kv_capacity)
    return float(request.steps.upper_s(*(np.array([value], float) for value in (mhz, running, kv_tokens, 0.0)))[0])


def drawn_w(request: TableRequest, mix: Mix, mhz: int, running: int) -> float:
    """What a load draws at a clock, without a rest."""
    kv_tokens = min(running * mix.kv_tokens, request.kv_capacity)
    load = mhz, running, kv_tokens, running * mix.prompt_tokens
    return request.watts.joules(request.steps.best, *load) / request.steps.best.step_s(*load)


@given(requests, mixes)
def test_more_watts_never_carry_less(request: TableRequest, mix: Mix) -> None:
    found = ceilings(request, mix)
    for low, high in pairwise(found):
        assert low.watts < high.watts
        assert low.tokens_s < high.tokens_s
        assert low.running <= high.running
        assert low.prompts <= high.prompts
        assert high.clock_mhz == DEFAULT_CLOCKS or low.clock_mhz < high.clock_mhz
    assert {each.clock_mhz for each in found} <= {DEFAULT_CLOCKS, *LADDER_MHZ}


@given(requests, mixes)
def test_the_most_requests_that_are_carried_keep_the_limit_and_one_more_breaks_it(
    request: TableRequest, mix: Mix
) -> None:
    allowed_s = request.margin * request.limit_s
    highest_mhz = request.steps.best.highest_mhz
    found = ceilings(request, mix)
    assert bool(found) == (step_upper_s(request, mix, highest_mhz, 1) <= allowed_s)
    for each in found:
        mhz = each.clock_mhz or highest_mhz
        assert step_upper_s(request, mix, mhz, each.running) <= allowed_s
        more_s = step_upper_s(request, mix, mhz, each.running + 1)
        assert each.running == MOST_RUNNING or more_s > allowed_s
        late_s = prompts_s(request, mhz, each.prompts + 1)
        assert each.prompts == 16 or late_s > PROMPT_SHARE * request.first_token_s


@given(requests, mixes, st.integers(1, MOST_RUNNING), st.sampled_from(LADDER_MHZ))
def test_no_load_that_is_carried_draws_more_at_any_clock_up_to_the_ceiling(
    request: TableRequest, mix: Mix, running: int, mhz: int
) -> None:
    for each in ceilings(request, mix):
        if running <= each.running and (each.clock_mhz == DEFAULT_CLOCKS or mhz <= each.clock_mhz):
            assert drawn_w(request, mix, mhz, running) <= each.watts * (1 + 1e-9)


@given(requests, mixes, st.sampled_from(LADDER_MHZ))
def test_a_clock_that_is_left_out_carries_no_more_than_a_cheaper_ceiling(
    request: TableRequest, mix: Mix, mhz: int
) -> None:
    found = ceilings(request, mix)
    if any(each.clock_mhz == mhz for each in found):
        return
    running = np.arange(1.0, MOST_RUNNING + 1)
    kv_tokens = np.minimum(running * mix.kv_tokens, request.kv_capacity)
    clocks_mhz = np.full_like(running, mhz)
    kept = request.steps.upper_s(clocks_mhz, running, kv_tokens, 0.0 * running) <= request.margin * request.limit_s
    load = clocks_mhz, running, kv_tokens, running * mix.prompt_tokens
    step_s = request.steps.best.steps_s(*load)
    tokens_s = (kept * running / step_s).max()
    watts = (kept * request.watts.joules_of(request.steps.best, *load) / step_s).max()
    cheaper = [each.tokens_s for each in found if each.watts <= watts * (1 + 1e-9)]
    assert not kept.any() or max(cheaper) >= tokens_s * (1 - 1e-9)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_mix_that_no_requests_have_is_refused_by_name(value: float) -> None:
    with pytest.raises(InvalidProblem, match="kv_tokens must be from 0 to"):
        Mix(value, 1.0)
    with pytest.raises(InvalidProblem, match="prompt_tokens must be from 0 to"):
        Mix(1.0, value)

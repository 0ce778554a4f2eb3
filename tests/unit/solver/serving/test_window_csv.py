"""Windows as text come back as they were; any other text is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_solver.errors import InvalidProblem
from perseus_solver.serving import Window, windows_from_csv, windows_to_csv

WINDOWS = st.builds(
    Window,
    clock_mhz=st.integers(1, 10_000),
    seconds=st.floats(1e-3, 3_600.0),
    running=st.floats(0.0, 65_536.0),
    kv_tokens=st.floats(0.0, 1e9),
    steps=st.integers(1, 10**7),
    step_s=st.floats(1e-5, 59.0),
    watts=st.none() | st.floats(1e-3, 1e5),
    reached_mhz=st.none() | st.integers(1, 10_000),
)


@given(st.lists(WINDOWS, max_size=4))
def test_windows_come_back_to_six_digits(windows: list[Window]) -> None:
    back = windows_from_csv(windows_to_csv(windows))
    assert len(back) == len(windows)
    for one, other in zip(windows, back, strict=True):
        assert (one.clock_mhz, one.steps, one.reached_mhz) == (other.clock_mhz, other.steps, other.reached_mhz)
        for name in ("seconds", "running", "kv_tokens", "step_s"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-5)
        assert (other.watts is None) is (one.watts is None)


@given(st.text(max_size=100))
def test_any_text_is_windows_or_refused(text: str) -> None:
    try:
        windows_from_csv(windows_to_csv(()) + text)
    except InvalidProblem:
        return

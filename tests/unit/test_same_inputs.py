"""Generated inputs are the same whatever ran before: a law that fails beside others also fails by itself."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def test_inputs_do_not_depend_on_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs() -> list[str]:
        drawn: list[str] = []

        @given(st.lists(st.floats(), min_size=5))
        def law(numbers: list[float]) -> None:
            drawn.append(repr(numbers))

        law()
        return drawn

    before = inputs()
    (tmp_path / "numbers_of_ours.py").write_text("\n".join(f"A{k} = {k}.123" for k in range(100)))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("numbers_of_ours")
    assert inputs() == before

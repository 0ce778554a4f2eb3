"""The package's face: every exported name exists, and the example in its docstring runs."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import perseus_solver

PAGE = Path(__file__).resolve().parents[3] / "docs" / "library.md"


def test_every_exported_name_can_be_imported() -> None:
    for name in perseus_solver.__all__:
        assert getattr(perseus_solver, name) is not None
    assert set(perseus_solver.__all__) <= set(dir(perseus_solver)), "a notebook completes them"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'solve_everything'"):
        perseus_solver.solve_everything  # noqa: B018  # the access itself is under test


def test_the_page_on_the_library_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        (0, "forward", 1400, 0.050, 20), (0, "forward", 1000, 0.060, 16), (0, "backward", 1400, 0.100, 40),
        (0, "backward", 1000, 0.120, 32), (1, "forward", 1400, 0.040, 16), (1, "forward", 1000, 0.048, 13),
        (1, "backward", 1400, 0.080, 32), (1, "backward", 1000, 0.096, 26),
    ]  # fmt: skip
    lines = [",".join(map(str, row)) for row in rows]
    Path("profile.csv").write_text("\n".join(["stage,instruction,frequency,time,energy", *lines]))
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 20
    assert outcome.failed == 0


def test_the_example_in_the_docstring_runs() -> None:
    outcome = doctest.testmod(perseus_solver)
    assert outcome.attempted > 5
    assert outcome.failed == 0

"""The package's face: every exported name exists, and the example in its docstring runs."""

from __future__ import annotations

import doctest

import pytest

import perseus_solver


def test_every_exported_name_can_be_imported() -> None:
    for name in perseus_solver.__all__:
        assert getattr(perseus_solver, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'solve_everything'"):
        perseus_solver.solve_everything  # noqa: B018  # the access itself is under test


def test_the_example_in_the_docstring_runs() -> None:
    outcome = doctest.testmod(perseus_solver)
    assert outcome.attempted > 5
    assert outcome.failed == 0

"""The examples in docstrings of the shared modules run as they are."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from perseus_proto import logs, rank, units


@pytest.mark.parametrize("module", [logs, rank, units], ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0

"""The examples in the client's documentation run as they are, without an agent."""

from __future__ import annotations

import doctest

import pytest

import perseus_client
from perseus_proto import keys


def test_the_example_of_the_package_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.ENV_SOCKET, raising=False)
    result = doctest.testmod(perseus_client)
    assert result.attempted > 0
    assert result.failed == 0

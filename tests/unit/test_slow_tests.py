"""The list of slow tests at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import pytest
from tests.slow_tests import SLOWEST_S, slow_tests


def report(
    test: str, when: Literal["setup", "call", "teardown"], took_s: float, marks: Iterable[str] = ()
) -> pytest.TestReport:
    keywords = dict.fromkeys(marks, 1)
    return pytest.TestReport(test, ("file", 1, test), keywords, "passed", None, when, duration=took_s)


def test_what_takes_longer_with_its_set_up_is_listed_the_slowest_first() -> None:
    title, *lines = slow_tests(
        [
            report("quick", "call", SLOWEST_S - 0.1),
            report("slow to set up", "setup", SLOWEST_S),
            report("slow to set up", "call", 0.5),
            report("slow to end", "teardown", 100.0),
            report("slowest", "call", 60.0),
            report("marked", "call", 100.0, ["slow"]),
            "what plugins add",
        ]
    )
    assert title.startswith("longer than 5 s and not marked slow: 2")
    assert [line.split(" s  ")[1] for line in lines] == ["slowest", "slow to set up"]


def test_nothing_is_printed_where_all_are_quick() -> None:
    assert slow_tests([report("quick", "call", 0.1)]) == []

"""Which tests take longer than a test of `make test` should: a report at the end of a run, which fails nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import pytest

SLOWEST_S: Final = 5.0
"""What a test takes at most with its set-up, on the reference machine: two quiet cores. A busy one takes its time."""


def slow_tests(reports: Iterable[object]) -> list[str]:
    """What to print about the tests that took longer and are not marked slow.

    Args:
        reports: of a run; what is no report of a test is passed over.

    Returns:
        A title and a line for each such test, the slowest first; nothing, if there is none.
    """
    took_s: dict[str, float] = defaultdict(float)
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when != "teardown" and "slow" not in report.keywords:
            took_s[report.nodeid] += report.duration
    slow = sorted(((seconds, test) for test, seconds in took_s.items() if seconds > SLOWEST_S), reverse=True)
    title = f"longer than {SLOWEST_S:g} s and not marked slow: {len(slow)} (a report, no failure)"
    return [title, *(f"{seconds:7.1f} s  {test}" for seconds, test in slow)] if slow else []

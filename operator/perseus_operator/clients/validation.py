"""What an agent may say: numbers that can be true. What cannot is left out at the door, as if it had never been said.

Called by ``agents`` for everything that comes in. An agent may be broken, old or malicious: its own job suffers, but
what it says must not make a status that the API server refuses, nor a number that no other agent takes. Whether
something is *likely* is for the statistics. Pure.
"""

from __future__ import annotations

from typing import Final

from perseus_operator.planning.iterations import Report
from perseus_operator.planning.state import Rank

MAX_ITERATION: Final = 2**53
"""Agents take no larger one, and a status has no room for it."""
MAX_TIME_US: Final = 7 * 24 * 3600 * 1_000_000
"""Of one iteration: a week, as in the PerseusJob."""
MAX_POWER_KW: Final = 10
"""Of one GPU, on average over an iteration; several times what any takes."""
MAX_NAME: Final = 512


def rank_can_be(rank: Rank) -> bool:
    """Whether a training process may say so of itself."""
    return rank.iteration <= MAX_ITERATION and len(rank.gpu_uuid) <= MAX_NAME and len(rank.pod_uid) <= MAX_NAME


def report_can_be(report: Report) -> bool:
    """Whether an iteration can have gone like that."""
    time_us = report.iteration_time_us
    return (
        report.iteration < MAX_ITERATION
        and 0 < report.compute_span_us <= MAX_TIME_US
        and 0 < time_us <= MAX_TIME_US
        and (report.energy_mj is None or report.energy_mj <= MAX_POWER_KW * time_us)  # mJ / µs = kW
        and report.quiet_us <= time_us
        and report.quiet_mj <= (report.energy_mj or 0)
    )

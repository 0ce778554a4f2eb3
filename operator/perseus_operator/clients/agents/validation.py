"""Bounds on what an agent reports: values that cannot be true are discarded as if they had never arrived.

An agent may be broken, old or malicious. Its own job suffers, but nothing that it reports may make a status that the
API server refuses, or a number that no other agent accepts. Whether a value is *likely* is a matter of statistics.
"""

from __future__ import annotations

from typing import Final

from perseus_core.iteration import IterationReport
from perseus_core.units import mean_power_w
from perseus_operator.nodes.node import Rank
from perseus_proto.iteration import MAX_TOGETHER
from perseus_proto.planset import MAX_INSTRUCTIONS

MAX_ITERATION: Final = 2**53
"""Agents accept no larger number, and a status cannot hold one."""
MAX_TIME_US: Final = 7 * 24 * 3600 * 1_000_000
"""Longest iteration: a week, as in the PerseusJob."""
MAX_POWER_W: Final = 10_000
"""Highest mean power of one GPU over an iteration; several times what any GPU draws."""
MAX_NAME: Final = 512


def is_valid_rank(rank: Rank) -> bool:
    """Whether a training process can have these properties."""
    return rank.iteration <= MAX_ITERATION and len(rank.gpu_uuid) <= MAX_NAME and len(rank.pod_uid) <= MAX_NAME


def is_valid_report(report: IterationReport) -> bool:
    """Whether an iteration can have these figures."""
    time_us, gpus = report.iteration_time_us, len(report.together) or 1
    return (
        report.iteration < MAX_ITERATION
        and max(len(report.durations_us), len(report.instruction_energies_mj)) <= MAX_INSTRUCTIONS
        and len(set(report.together)) == len(report.together) <= MAX_TOGETHER
        and 0 < report.compute_span_us <= MAX_TIME_US
        and 0 < time_us <= MAX_TIME_US
        and (report.energy_mj is None or mean_power_w(report.energy_mj, time_us) <= MAX_POWER_W * gpus)
        and report.quiet_us <= time_us
        and report.quiet_mj <= (report.energy_mj or 0)
    )

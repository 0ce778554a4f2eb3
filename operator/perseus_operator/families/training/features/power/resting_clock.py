"""The clock at which a job under a PowerBudget rests: what its GPUs run at while no plan wants a clock, and when the
operator is gone.

Default clocks would draw more than the share. At the resting clock the GPUs cannot exceed it, whatever they execute: it
is the highest at which each of them may run its most power-hungry instruction without a pause.
"""

from __future__ import annotations

from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_core.units import w_from_mw
from perseus_operator.budgets.allocation import Share
from perseus_operator.solving.view import FrontierView


def resting_clock(share: Share | None, frontier: FrontierView | None, replicas: int) -> RestingClock:
    """The clock at which a job keeps within its share.

    Args:
        share: of a PowerBudget; None: no budget selects the job.
        frontier: of one pipeline; None: not known yet.
        replicas: how often the frontier's energy is spent: data-parallel times tensor-parallel size.

    Returns:
        The highest measured clock that fits, or if none does, the lowest. While share or frontier is not known yet,
        what an earlier operator had asked for.
    """
    if share is None:
        return NO_RESTING_CLOCK
    watts = share.watts
    if watts is None or frontier is None or not frontier.ceilings_mw:
        return RestingClock(0, share.hold_s)
    fitting = [mhz for mhz, ceiling_mw in frontier.ceilings_mw if replicas * w_from_mw(ceiling_mw) <= watts]
    return RestingClock(max(fitting, default=frontier.ceilings_mw[0][0]), share.hold_s)

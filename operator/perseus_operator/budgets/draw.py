"""What a job draws, as its status says it to the replica of the operator that shares PowerBudgets.

The replica that serves a job knows its plans; the one that shares a budget may be another. It reads of jobs that it
does not serve what is written here, and of its own what it knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from perseus_core.units import ratio_from_share
from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.power_status import MAX_SPEEDS, DrawStatus, MeterStatus, ShareStatus, SpeedStatus
from perseus_operator.api.stored import parse_stored, stored_items
from perseus_operator.budgets.allocation import Claim, Share
from perseus_operator.budgets.member import Member
from perseus_operator.budgets.reading import Reading
from perseus_operator.objects.formatting import exact_percent, percent

_MILLION: Final = 1_000_000


def share_to_status(share: Share | None, draw: DrawStatus | None, slowdown: float | None) -> ShareStatus | None:
    """Write down a job's share of a PowerBudget; None: none is granted yet, and nobody else is to grant it.

    Args:
        share: of the job; None: no budget selects it.
        draw: what the replica that shares the budget must know of it; None: that is this one.
        slowdown: by what share the job is slower than its objective asks for; None: no PowerBudget slows it.
    """
    if share is None or (share.watts is None and draw is None):
        return None
    return ShareStatus(
        name=share.budget,
        watts=None if share.watts is None else int(share.watts),
        slowdown=None if slowdown is None else percent(slowdown),
        draw=draw,
    )


def draw_to_status(member: Member) -> DrawStatus:
    """Write down a member for the replica that shares the budget. Watts are rounded up: no plan draws more."""
    claim = member.claim
    return DrawStatus(
        held_watts=math.ceil(member.held_w) if math.isfinite(member.held_w) else None,
        unsteered_watts=None if member.drawn_w is None else math.ceil(member.drawn_w),
        gpus=None if claim is None else claim.gpus,
        speeds=None if claim is None else _speeds(claim),
    )


def member_from_status(job: str, priority: int, status: Mapping[str, Any]) -> Member | None:
    """Read a member from the status of a job that another replica serves; None: it draws no power.

    Args:
        job: namespace/name.
        priority: of the job.
        status: of the PerseusJob; what cannot be read in it is not known.
    """
    conditions = stored_items(status.get("conditions"))
    active = not any(each.get("type") == ConditionType.ACTIVE and each.get("status") == "False" for each in conditions)
    share = parse_stored(ShareStatus, status.get("powerBudget"))
    if not active and (share is None or share.draw is None):  # a suspended job may draw power nevertheless
        return None
    if share is None:
        return Member(job, priority)
    draw = share.draw or DrawStatus()
    held_w = math.inf if draw.held_watts is None else float(draw.held_watts)
    claim = None
    if draw.speeds:
        curve = tuple((float(at.watts), ratio_from_share(at.speed)) for at in draw.speeds)
        frontier = status.get("frontier")
        digest = str(frontier.get("digest", "")) if isinstance(frontier, Mapping) else ""
        claim = Claim(job, priority, draw.gpus or 0, curve, digest)
    follows_w = None if share.watts is None else float(share.watts)
    drawn_w = None if draw.unsteered_watts is None else float(draw.unsteered_watts)
    meter = draw.meter
    reading = None if meter is None else Reading(float(meter.joules), float(meter.gpu_seconds))
    return Member(job, priority, claim, drawn_w, held_w, follows_w, meter.gpus if meter else 0, reading)


def meter_to_status(member: Member) -> MeterStatus:
    """Write down what was measured of a member. It is rounded down each time, and what is left out is in the next."""
    reading = member.reading or Reading()
    return MeterStatus(joules=int(reading.energy_j), gpu_seconds=int(reading.gpu_s), gpus=member.gpus)


def _speeds(claim: Claim) -> tuple[SpeedStatus, ...]:
    """The plans on the hull, of which alone an allocation consists; of many some, first and last among them."""
    hull = [watts for watts, _ in claim.hull()]
    step = max(1.0, (len(hull) - 1) / (MAX_SPEEDS - 1))
    kept = {hull[round(number * step)] for number in range(MAX_SPEEDS) if round(number * step) < len(hull)}
    speeds = [
        (round(watts), exact_percent(math.floor(_MILLION * speed) / _MILLION))
        for watts, speed in claim.curve
        if watts in kept
    ]
    return tuple(SpeedStatus(watts=watts, speed=speed) for watts, speed in speeds)

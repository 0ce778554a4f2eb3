"""While it is not known what one job draws, its watts go to no other job of a PowerBudget."""

from __future__ import annotations

from typing import Final

from perseus_operator.api.budget import BudgetSpec
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.budgets.allocation import Claim
from perseus_operator.budgets.budget import BudgetDecision, decide_shares, decision_from_status, figures
from perseus_operator.budgets.member import Member

SPEC: Final = parse_spec(BudgetSpec, {"watts": 1_000})
PLANNED: Final = Member("ns/a", 0, Claim("ns/a", 0, 4, ((400.0, 0.5), (700.0, 0.8), (900.0, 1.0))))
DRAWN: Final = Member("ns/b", 0, drawn_w=500.0)
UNKNOWN: Final = Member("ns/b", 0)


def shared(before: BudgetDecision, *members: Member) -> BudgetDecision:
    return decide_shares(SPEC, members, before)


def test_what_was_set_aside_for_a_job_stays_so_until_it_is_known_again() -> None:
    """Its agents are cut off from the replica that serves it, say."""
    before = shared(BudgetDecision(), PLANNED, DRAWN)
    assert before.allocation.shares_w == {"ns/a": 500.0}
    meanwhile = shared(before, PLANNED, UNKNOWN)
    assert meanwhile.allocation.shares_w == {"ns/a": 500.0}
    assert meanwhile.reserved_w == DRAWN.drawn_w
    after = shared(meanwhile, PLANNED, Member("ns/b", 0, drawn_w=100.0))
    assert after.allocation.shares_w == {"ns/a": 900.0}
    assert shared(meanwhile, PLANNED).allocation.shares_w == {"ns/a": 900.0}, "once it has gone nothing is set aside"


def test_what_an_operator_before_has_set_aside_is_read_from_the_status() -> None:
    """All replicas were gone, and the next one knows the planned job first."""
    written = dump(figures(SPEC, shared(BudgetDecision(), PLANNED, DRAWN)))
    restarted = decision_from_status(written)
    assert shared(restarted, PLANNED, UNKNOWN).allocation.shares_w == {"ns/a": 500.0}


def test_a_job_that_comes_new_takes_nothing_before_it_is_known() -> None:
    before = shared(BudgetDecision(), PLANNED)
    assert shared(before, PLANNED, UNKNOWN).allocation.shares_w == {"ns/a": 900.0}

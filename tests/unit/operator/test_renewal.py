"""When leases are renewed beside other commands to the same agent."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_operator.nodes.actions import Push, Renew


@pytest.fixture
def sending(job: Any) -> Any:
    """A job of two nodes whose leases are due in ten seconds; to one of them a plan is on its way."""
    job.run()
    job.state.nodes["node-0"].command_started(lease_stands=True)
    return job


def test_a_lease_is_renewed_while_a_plan_is_on_its_way(sending: Any) -> None:
    """Seed 571 of the simulation: the plan was lost, its deadline is three times a renewal's, and the lease ran out."""
    node = sending.state.nodes["node-0"]
    made = sending.decide()
    assert made.actions == ()
    assert made.wake_at_s <= node.renew_at_s
    sending.now_s = node.renew_at_s + 0.1
    assert set(sending.decide().actions) == {Renew("node-0"), Renew("node-1")}
    node.renewal_started()
    assert set(sending.decide().actions) == {Renew("node-1")}
    node.renewal_ended()
    node.lease_lost()
    assert set(sending.decide().actions) == {Renew("node-1")}, "the next one is acquired once the plan has an outcome"


def test_no_lease_is_renewed_beside_what_changes_it(job: Any) -> None:
    job.run()
    job.state.nodes["node-0"].command_started()
    job.now_s += 11
    assert set(job.decide().actions) == {Renew("node-1")}


def test_no_other_command_is_sent_beside_a_plan(sending: Any) -> None:
    for node in sending.nodes:
        node.plans.lease_lost()  # both are to have plans again
    (push,) = sending.decide().actions
    assert isinstance(push, Push)
    assert push.node == "node-1"

"""What an operator has given up changes nothing after what it asked next, however late the agent comes to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.node_bench import PLANS, Bench

from perseus_agent.errors import NoLease
from perseus_core.serving import EngineOrders, ServingLimits


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.node.drain(60)


def test_a_request_that_waited_for_the_disk_does_not_replace_what_was_granted_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 377 of the simulation: its caller had given up, and had the lease name other pods."""
    record = bench.journal.record_epoch

    def wait(job: str, epoch: int) -> None:
        monkeypatch.setattr(bench.journal, "record_epoch", record)
        bench.lease(pods=("pod-1",), number=2)
        record(job, epoch)

    monkeypatch.setattr(bench.journal, "record_epoch", wait)
    with pytest.raises(NoLease, match="1 comes after 2"):
        bench.lease(pods=("pod-0",), number=1)
    assert [[*lease.pods] for lease in bench.node.leases.all()] == [["pod-1"]]


def test_what_was_given_up_changes_nothing_after_what_was_asked_next(bench: Bench) -> None:
    """An agent that was stopped finds both, and carries them out in any order."""
    bench.lease(pods=("pod-1",), clock_mhz=900, number=2)
    late = (
        lambda: bench.lease(pods=("pod-0",), number=1),
        lambda: bench.node.push("job", 1, PLANS, 1),
        lambda: bench.node.order_engines("job", 1, EngineOrders(ServingLimits(None, None)), 1),
    )
    for each in late:
        with pytest.raises(NoLease, match="1 comes after 2"):
            each()
    bench.node.push("job", 1, PLANS, 3)
    bench.node.select("job", 1, PLANS.plan_id, {0: 1}, 0, number=5)
    with pytest.raises(NoLease, match="4 comes after 5"):
        bench.node.select("job", 1, PLANS.plan_id, {0: 0}, 0, number=4)
    [lease] = bench.node.leases.all()
    assert ([*lease.pods], lease.clock.mhz, lease.orders) == (["pod-1"], 900, None)
    assert bench.node.lease_views()[0].selections == {0: 1}


def test_another_operator_counts_anew_and_an_older_one_not_at_all(bench: Bench) -> None:
    bench.lease(epoch=1, number=7)
    bench.lease(epoch=2, pods=("pod-1",), number=1)
    bench.node.push("job", 2, PLANS, 0)
    [lease] = bench.node.leases.all()
    assert ([*lease.pods], lease.number) == (["pod-1"], 1)

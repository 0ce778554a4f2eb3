"""Leases and fencing, with a clock that the test turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from perseus_agent.clocks import journal
from perseus_agent.clocks.journal import Journal
from perseus_agent.errors import InvalidRequest, JournalError, NoLease, PodTaken, StaleEpoch, TooMuch
from perseus_agent.node.leases import MAX_JOBS, MAX_PODS, JobLease, LeaseRequest, LeaseTable, PodName
from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_core.serving import EngineOrders, PageAddress, ServingLimits

POD = PodName("uid-1", "training", "pod-1")


class Table:
    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.journal, _ = Journal.open(path, "boot")
        self.leases = LeaseTable(self.journal, lambda: self.now_s)

    def acquire(
        self,
        job: str = "job",
        epoch: int = 1,
        ttl_s: float = 10.0,
        pods: tuple[PodName, ...] = (POD,),
        clock: RestingClock = NO_RESTING_CLOCK,
        named_gpus: tuple[tuple[str, str], ...] = (),
    ) -> list[JobLease]:
        """Return the leases that it ends."""
        wanted = LeaseRequest(job, f"ns/{job}", epoch, ttl_s, pods, clock, named_gpus)
        self.leases.check(wanted)
        self.journal.record_epoch(job, epoch)
        return self.leases.acquire(wanted)[1]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "journal")


def test_many_other_jobs_do_not_give_a_replaced_operator_its_job_back(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_EPOCHS", 20)
    table.acquire(epoch=7)
    for number in range(25):
        table.acquire(f"short-{number}", pods=(PodName(f"uid-{number}-short", "evil", "pod"),))
        table.leases.release(f"short-{number}", 1)
    with pytest.raises(StaleEpoch):
        table.acquire(epoch=3)
    assert len(table.journal._state.epochs) == 20


def test_a_lease_runs_out_exactly_at_its_end_unless_renewed(table: Table) -> None:
    table.acquire(ttl_s=10)
    table.now_s = 9
    table.leases.renew("job", 1, 10)
    table.now_s = 18.9
    assert table.leases.expired() == []
    lease = table.leases.of_pod("uid-1")
    assert lease is not None
    assert table.leases.is_held(lease)
    page = PageAddress("10.0.0.1", 8000)
    lease.order(EngineOrders(ServingLimits(None, None), pages={"uid-1": page}))
    assert table.leases.pages(but=()) == {"uid-1": page}
    table.now_s = 19.0
    assert table.leases.of_pod("uid-1") is None
    assert table.leases.pages(but=()) == {}
    assert not table.leases.is_held(lease)
    with pytest.raises(NoLease):
        table.leases.held("job", 1)
    assert [lease.job_uid for lease in table.leases.expired()] == ["job"]
    assert table.leases.expiries == 1


def test_an_older_epoch_is_refused_by_every_command(table: Table) -> None:
    table.acquire(epoch=5)
    for command in (
        lambda: table.acquire(epoch=4),
        lambda: table.leases.renew("job", 4, 10),
        lambda: table.leases.release("job", 4),
        lambda: table.leases.held("job", 4),
    ):
        with pytest.raises(StaleEpoch, match="4 is older than 5"):
            command()
    assert table.leases.held("job", 5).epoch == 5


def test_the_fence_outlives_lease_and_process(table: Table, tmp_path: Path) -> None:
    table.acquire(epoch=5)
    table.leases.release("job", 5)
    with pytest.raises(StaleEpoch):
        table.acquire(epoch=4)
    with pytest.raises(StaleEpoch):
        Table(tmp_path / "journal").acquire(epoch=4)


def test_a_newer_epoch_must_acquire_before_it_commands_and_then_takes_over_with_the_plans(table: Table) -> None:
    table.acquire(epoch=1)
    plans = table.leases.held("job", 1).plans
    with pytest.raises(NoLease, match="acquire it with 2 first"):
        table.leases.renew("job", 2, 10)
    table.acquire(epoch=2)
    assert table.leases.held("job", 2).plans is plans


def test_a_lease_is_not_held_once_another_took_its_place(table: Table) -> None:
    table.acquire()
    first = table.leases.held("job", 1)
    table.leases.release("job", 1)
    assert not table.leases.is_held(first)
    table.acquire()
    assert not table.leases.is_held(first)
    assert table.leases.is_held(table.leases.held("job", 1))


def test_releasing_what_is_not_held_is_no_error(table: Table) -> None:
    assert table.leases.release("never", 1) is None


def test_a_pod_belongs_to_one_job(table: Table) -> None:
    table.acquire("one")
    with pytest.raises(PodTaken, match=r"uid-1 belongs to the lease of ns/one"):
        table.acquire("two")
    assert table.leases.held("one", 1).pods.keys() == {"uid-1"}


def test_acquiring_again_replaces_the_pods(table: Table) -> None:
    table.acquire()
    table.acquire(pods=(PodName("uid-2", "training", "pod-2"),))
    assert table.leases.of_pod("uid-1") is None
    assert table.leases.of_pod("uid-2") is not None


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"job": ""}, "job_uid: must have 1 to"),
        ({"job": "x" * 600}, "job_uid: must have 1 to"),
        ({"epoch": 0}, "epoch: must be 1 to"),
        ({"epoch": 2**64 - 1}, "epoch: must be 1 to"),
        ({"ttl_s": 0.1}, "ttl_ms: must be 500 to 600000"),
        ({"ttl_s": 3600}, "ttl_ms: must be 500 to 600000"),
        ({"pods": ()}, "pods: must name 1 to"),
        ({"pods": (POD,) * 2}, "pods.uid: must not name a pod twice"),
        ({"pods": (PodName("", "a", "b"),)}, "pods: uid, namespace and name"),
        ({"named_gpus": (("node/gpu-0", "a"), ("node/gpu-0", "b"))}, "named_gpus.device: must not name a device twice"),
        ({"named_gpus": (("node/gpu-0", ""),)}, "named_gpus: must be at most 128, with 1 to 512 characters"),
        ({"named_gpus": tuple((f"node/gpu-{i}", "a") for i in range(129))}, "named_gpus: must be at most 128"),
        ({"pods": tuple(PodName(f"{i}", "a", "b") for i in range(MAX_PODS + 1))}, "pods: must name 1 to"),
    ],
)
def test_bad_input_names_field_and_rule_and_changes_nothing(table: Table, arguments: dict, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rule):
        table.acquire(**arguments)
    assert list(table.leases.all()) == []
    assert table.journal.epoch(arguments.get("job", "job")) == 0


def test_jobs_are_bounded(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.journal, "record_epoch", lambda job, epoch: None)
    for number in range(MAX_JOBS):
        table.acquire(f"job-{number}", pods=(PodName(f"{number}", "a", "b"),))
    with pytest.raises(TooMuch):
        table.acquire("one more")


def test_an_epoch_that_cannot_be_made_to_last_is_not_accepted(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: str, epoch: int) -> None:
        raise JournalError("disk full")

    monkeypatch.setattr(table.journal, "record_epoch", refuse)
    with pytest.raises(JournalError):
        table.acquire()
    assert list(table.leases.all()) == []


KEPT = RestingClock(900, keep_s=100.0)


def test_a_clock_that_stays_outlives_its_lease_but_commands_nothing(table: Table) -> None:
    table.acquire(clock=KEPT)
    table.now_s = 10.0
    [lapsed] = table.leases.expired()
    assert (lapsed.lapsed, table.leases.remaining_s(lapsed), table.leases.expiries) == (True, 100.0, 1)
    assert table.leases.of_pod("uid-1") is lapsed
    for command in (lambda: table.leases.renew("job", 1, 10), lambda: table.leases.held("job", 1)):
        with pytest.raises(NoLease):
            command()
    table.now_s = 109.0
    assert table.leases.expired() == []
    table.now_s = 110.0
    assert [(lease.job_uid, lease.lapsed) for lease in table.leases.expired()] == [("job", False)]
    assert (table.leases.of_pod("uid-1"), table.leases.expiries) == (None, 1)


def test_an_operator_takes_a_lapsed_lease_over_and_releases_it(table: Table) -> None:
    table.acquire(clock=KEPT)
    table.now_s = 50.0
    table.leases.expired()
    assert table.acquire(epoch=2) == []
    assert not table.leases.held("job", 2).lapsed
    table.acquire(epoch=2, clock=KEPT)
    table.now_s = 100.0
    table.leases.expired()
    assert table.leases.release("job", 2) is not None
    assert not list(table.leases.all())


def test_a_lapsed_lease_keeps_no_pod_from_another_job(table: Table) -> None:
    table.acquire(clock=KEPT)
    with pytest.raises(PodTaken):
        table.acquire("another")
    table.now_s = 50.0
    table.leases.expired()
    assert [lease.job_uid for lease in table.acquire("another")] == ["job"]
    assert [lease.job_uid for lease in table.leases.all()] == ["another"]


def test_who_does_not_know_the_clock_yet_leaves_it(table: Table) -> None:
    table.acquire(clock=RestingClock(0, keep_s=5.0))
    assert table.leases.held("job", 1).clock == NO_RESTING_CLOCK
    table.acquire(clock=KEPT)
    table.acquire(epoch=2, clock=RestingClock(0, keep_s=5.0))
    assert table.leases.held("job", 2).clock == RestingClock(900, keep_s=5.0)
    table.acquire(epoch=2)
    assert table.leases.held("job", 2).clock == NO_RESTING_CLOCK


def test_a_clock_may_not_stay_for_weeks(table: Table) -> None:
    with pytest.raises(InvalidRequest, match="keep_clock_ms: must be at most 604800000"):
        table.acquire(clock=RestingClock(900, keep_s=1e9))
    assert not list(table.leases.all())

"""The node joins leases, processes and GPUs: in one process, with real memory and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.node_bench import LIMITS, PLANS, Bench, Rank
from tests.doubles.recording_gpu import RecordingGpu, RecordingSet
from tests.doubles.recording_node import gpu_uuid, plan_set_of, wait_for

from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.telemetry import RankChange, TelemetryHub
from perseus_agent.errors import Draining, InvalidRequest, NoLease, PeerRefused, StaleEpoch, TooMuch
from perseus_agent.node.leases import MAX_FURTHEST, LeaseRequest, PodName
from perseus_agent.node.node import Node
from perseus_agent.node.processes import MAX_SESSIONS_OF_POD
from perseus_proto.hello import Reason
from perseus_proto.planset import decode_plan_set


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.node.drain(60)


def test_the_clock_keeper_hears_of_the_agent_before_a_gpu_can_be_locked(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path / "journal", "boot")
    threads_when_heard: list[set[threading.Thread]] = []

    def hear() -> None:
        threads_when_heard.append(set(threading.enumerate()))

    node = Node(RecordingSet([RecordingGpu(gpu_uuid(0))]), journal, None, TelemetryHub(1), LIMITS, kept=hear)
    before = set(threading.enumerate())
    node.start()
    first = list(threads_when_heard[:1])
    assert node.drain(5.0) == []
    assert first
    assert first[0] <= before, "a thread of a GPU may lock it at once"


def test_a_restarted_process_goes_on_with_the_plan_that_was_in_force(bench: Bench) -> None:
    bench.lease()
    first = Rank()
    bench.node.admit(first.session)
    bench.plan()
    first.writer.step_begin(5_000, 1)
    wait_for(lambda: bench.locked() == 1200, "the plan is followed")
    bench.plan(point=1, from_iteration=5_001)
    first.writer.step_begin(5_001, 2)
    wait_for(lambda: bench.locked() == 600, "the selection is followed")
    bench.node.leave(first.session)
    wait_for(lambda: bench.locked() is None, "the GPU is given back")
    second = Rank()
    bench.node.admit(second.session)
    second.writer.step_begin(0, 3)  # counts from zero again
    wait_for(lambda: bench.locked() == 600, "the same point is in force")


def test_the_clock_of_a_lease_holds_whenever_no_plan_wants_another(bench: Bench) -> None:
    bench.lease(clock_mhz=900)
    wait_for(lambda: bench.locked() == 900, "no process is there")
    rank = Rank()
    bench.node.admit(rank.session)
    rank.writer.step_begin(0, 1)
    wait_for(lambda: bench.node.ranks()[0][1] == 0 and bench.node.ranks()[0][0].gpu_uuid, "the process is known")
    assert bench.locked() == 900
    bench.plan()
    rank.writer.step_begin(1, 2)
    wait_for(lambda: bench.locked() == 1200, "its plan is followed")
    bench.node.leave(rank.session)
    wait_for(lambda: bench.locked() == 900, "the process has gone")
    bench.node.release("job", 1)
    assert bench.locked() is None
    assert [call.mhz for call in bench.gpus[0].calls] == [900, 1200, 900, None], "never the default in between"


def test_a_clock_that_stays_takes_the_place_of_the_plan_when_the_lease_runs_out(bench: Bench) -> None:
    bench.lease(clock_mhz=900, keep_s=60.0)
    rank = Rank()
    bench.node.admit(rank.session)
    rank.writer.step_begin(0, 1)
    bench.plan()
    rank.writer.step_begin(1, 2)
    wait_for(lambda: bench.locked() == 1200, "its plan is followed")
    bench.now_s += 60
    wait_for(lambda: bench.locked() == 900, "the operator is gone")
    assert not rank.hung_up
    with pytest.raises(NoLease):
        bench.node.renew("job", 1, 60)
    bench.lease(clock_mhz=900, keep_s=60.0, epoch=2)
    bench.node.push("job", 2, PLANS, 0)
    bench.node.select("job", 2, PLANS.plan_id, {0: 0}, 2, number=0)
    rank.writer.step_begin(2, 3)
    wait_for(lambda: bench.locked() == 1200, "the next operator's plan is followed")
    bench.node.release("job", 2)
    assert None not in [call.mhz for call in bench.gpus[0].calls][:-1], "never the default in between"
    assert bench.locked() is None


def test_a_lease_that_gives_up_its_clock_leaves_the_plan(bench: Bench) -> None:
    bench.lease(clock_mhz=900)
    rank = Rank()
    bench.node.admit(rank.session)
    bench.plan()
    rank.writer.step_begin(0, 1)
    wait_for(lambda: bench.locked() == 1200, "its plan is followed")
    bench.lease()
    rank.writer.begin(0, 2)
    bench.node.leave(rank.session)
    wait_for(lambda: bench.locked() is None, "nothing wants a clock")


def test_a_selection_reaches_the_gpu_of_a_rank_between_two_steps_at_once(bench: Bench) -> None:
    """Nothing rings at a step's end, so whoever selects wakes the GPU's worker."""
    bench.lease()
    rank = Rank()
    bench.node.admit(rank.session)
    bench.plan(point=1)  # whose clock never changes
    rank.writer.step_begin(0, 1)
    wait_for(lambda: bench.locked() == 600, "the plan is followed")
    for index in range(2):
        rank.writer.begin(index, 2)
        rank.writer.end(index, 2)
    rank.writer.step_end(0, 3)
    assert rank.writer.rings == 1
    bench.plan(point=0)
    wait_for(lambda: bench.locked() == 1200, "the clock of the iteration to come")
    assert rank.writer.rings == 1


def test_a_process_that_says_the_same_again_replaces_the_one_before(bench: Bench) -> None:
    bench.lease()
    old, new = Rank(), Rank()
    bench.node.admit(old.session)
    bench.node.admit(new.session)
    assert old.hung_up
    bench.plan()
    new.writer.step_begin(0, 1)
    wait_for(lambda: bench.locked() == 1200, "the new one is followed")
    bench.node.leave(old.session)
    assert bench.locked() == 1200


def test_a_process_that_came_before_its_lease_joins_when_it_comes(bench: Bench) -> None:
    rank = Rank()
    bench.node.admit(rank.session)
    assert not rank.session.seats
    bench.lease()
    wait_for(lambda: bool(rank.session.seats), "the binder makes a rank of it")


def test_a_lease_that_ends_keeps_the_connection_and_the_next_one_finds_it(bench: Bench) -> None:
    bench.lease()
    rank = Rank()
    bench.node.admit(rank.session)
    bench.plan()
    rank.writer.step_begin(0, 1)
    wait_for(lambda: bench.locked() == 1200, "the plan is followed")
    assert bench.node.release("job", 1) == [gpu_uuid(0)]
    assert bench.locked() is None
    assert not rank.hung_up
    bench.lease(epoch=2)
    wait_for(lambda: bool(rank.session.seats), "it is a rank again")


def test_a_process_that_dies_while_its_lease_ends_leaves_its_memory_to_the_gpu_until_then(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.lease()
    rank = Rank()
    bench.node.admit(rank.session)
    bench.plan()
    waiting, disk = threading.Event(), threading.Event()
    record = bench.journal.record_lock

    def slow(uuid: str) -> None:
        waiting.set()
        assert disk.wait(60)
        record(uuid)

    monkeypatch.setattr(bench.journal, "record_lock", slow)
    rank.writer.step_begin(0, 1)
    assert waiting.wait(60), "the GPU's thread follows the rank, and waits for the disk"
    released = threading.Thread(target=bench.node.release, args=("job", 1))
    released.start()
    wait_for(lambda: not rank.session.seats, "the lease has ended")
    bench.node.leave(rank.session)
    disk.set()
    released.join()
    wait_for(lambda: [call.mhz for call in bench.gpus[0].calls] == [1200, None], "the GPU is given back")
    wait_for(lambda: rank.channel._map.closed, "its memory is freed")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    bench.lease(epoch=2)
    following = Rank()
    bench.node.admit(following.session)
    bench.node.push("job", 2, PLANS, 0)
    bench.node.select("job", 2, PLANS.plan_id, {0: 0}, 0, number=0)
    following.writer.step_begin(0, 1)
    wait_for(lambda: bench.locked() == 1200, "the next process is followed")


def test_two_jobs_do_not_touch_each_other(bench: Bench) -> None:
    bench.lease("job", ("pod-0",))
    bench.lease("other", ("pod-1",))
    ranks = [Rank("pod-0"), Rank("pod-1")]
    watchers = [bench.node.watch(job) for job in ("job", "other")]
    for rank in ranks:
        bench.node.admit(rank.session)
    bench.plan()
    for rank in ranks:
        rank.writer.step_begin(0, 1)
    wait_for(lambda: bench.locked(0) == 1200, "the planned job's GPU is locked")
    assert bench.gpus[1].calls == []
    for number, watcher in enumerate(watchers):
        taken = watcher.take(60)
        assert taken is not None
        assert {event.rank.gpu_uuid for event in taken[1] if isinstance(event, RankChange)} == {gpu_uuid(number)}
    bench.node.release("other", 1)
    assert bench.locked(0) == 1200


def test_plan_sets_are_bounded_over_all_jobs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perseus_agent.node.leases.MAX_PLAN_BYTES", 2 * PLANS.memory_bytes - 1)
    bench.lease("job", ("pod-0",))
    bench.lease("other", ("pod-1",))
    bench.node.push("job", 1, PLANS, 0)
    bench.node.push("job", 1, PLANS, 0)  # replaces its own
    with pytest.raises(TooMuch, match="plan_set: the plan sets of this node would take"):
        bench.node.push("other", 1, PLANS, 0)


def test_plan_sets_that_wait_for_their_iteration_count_too_and_each_namespace_has_its_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus_agent.node.leases.NAMESPACE_PLAN_BYTES", 3 * PLANS.memory_bytes)
    clocks = ([1200, 900], [1200, 600], [900, 600], [600, 1200])
    sets = [decode_plan_set(plan_set_of([[row, [600, 600]]])) for row in clocks]
    assert {each.memory_bytes for each in sets} == {PLANS.memory_bytes}
    bench.lease("job", ("pod-0",))
    for number, each in enumerate(sets[:3]):
        bench.node.push("job", 1, each, 0)
        bench.node.select("job", 1, each.plan_id, {0: 0}, 10 * number, number=0)
    with pytest.raises(TooMuch, match="plan_set: the plan sets of namespace ns would take"):
        bench.node.push("job", 1, sets[3], 0)
    bench.node.acquire(LeaseRequest("elsewhere", "other/job", 1, 60, [PodName("pod-1", "other", "pod-1")]))
    bench.node.push("elsewhere", 1, sets[3], 0)


def test_a_job_with_many_made_up_pipelines_keeps_few(bench: Bench) -> None:
    bench.lease("job", ("pod-0",))
    [lease] = bench.node.leases.all()
    for dp in range(3 * MAX_FURTHEST):
        lease.left(dp, dp)
    assert list(lease.furthest) == list(range(2 * MAX_FURTHEST, 3 * MAX_FURTHEST))


def test_a_container_waits_until_the_operator_has_named_it(bench: Bench) -> None:
    rank = Rank(container="c" * 64)
    pod = PodName("pod-0", "ns", "pod-0", frozenset({("d" * 64, "sidecar")}))
    bench.node.acquire(LeaseRequest("job", "ns/job", 1, 60, [pod]))
    bench.node.admit(rank.session)
    assert not rank.session.seats
    assert not rank.hung_up
    named = frozenset({*pod.containers, ("c" * 64, "trainer")})
    bench.node.acquire(LeaseRequest("job", "ns/job", 1, 60, [PodName(pod.uid, pod.namespace, pod.name, named)]))
    wait_for(lambda: bool(rank.session.seats), "it is a rank")


def test_processes_of_one_pod_are_bounded(bench: Bench) -> None:
    ranks = [Rank("stranger", dp) for dp in range(MAX_SESSIONS_OF_POD + 1)]
    for rank in ranks[:-1]:
        bench.node.admit(rank.session)
    with pytest.raises(PeerRefused, match="too many") as refusal:
        bench.node.admit(ranks[-1].session)
    assert refusal.value.reason is Reason.BUSY
    bench.node.leave(ranks[0].session)
    bench.node.admit(ranks[-1].session)


def test_an_agent_that_goes_down_takes_no_commands_and_no_processes(bench: Bench) -> None:
    bench.lease()
    rank = Rank()
    bench.node.admit(rank.session)
    assert bench.node.drain(60) == []
    assert rank.hung_up
    for command in (bench.lease, bench.plan, lambda: bench.node.renew("job", 1, 60), lambda: bench.node.watch("job")):
        with pytest.raises(Draining):
            command()
    with pytest.raises(PeerRefused) as refusal:
        bench.node.admit(Rank().session)
    assert refusal.value.reason is Reason.DRAINING
    bench.node.leave(rank.session)


def test_health_means_that_the_threads_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, go = threading.Event(), threading.Event()
    monkeypatch.setattr(bench.node, "_expire", lambda: stuck.set() or go.wait())
    assert stuck.wait(60)
    try:
        bench.node._kept_s = time.monotonic()
        assert bench.node.progressing
        bench.node._kept_s -= 3600
        assert not bench.node.progressing
    finally:
        go.set()
    wait_for(lambda: bench.node.progressing, "the keeper turns again")


def test_refused_commands_change_nothing(bench: Bench) -> None:
    bench.lease(epoch=5)
    before = [(view.epoch, view.plan_id, view.selections) for view in bench.node.lease_views()]
    for command in (lambda: bench.lease(epoch=4), bench.plan, lambda: bench.node.release("job", 4)):
        with pytest.raises(StaleEpoch):
            command()
    with pytest.raises(InvalidRequest):
        bench.node.push("job", 5, decode_plan_set(plan_set_of([[[1201, 900]]])), 0)
    assert [(view.epoch, view.plan_id, view.selections) for view in bench.node.lease_views()] == before


def test_a_slow_disk_keeps_no_lease_from_expiring(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, disk = threading.Event(), threading.Event()
    record = bench.journal.record_epoch

    def slow(job_uid: str, epoch: int) -> None:
        waiting.set()
        assert disk.wait(60)
        record(job_uid, epoch)

    bench.node.acquire(LeaseRequest("short", "ns/short", 1, 10.0, [PodName("pod-0", "ns", "pod-0")]))
    monkeypatch.setattr(bench.journal, "record_epoch", slow)
    blocked = threading.Thread(target=bench.lease, args=("other", ("pod-1",)))
    blocked.start()
    assert waiting.wait(60)
    bench.now_s += 10
    try:
        wait_for(lambda: not bench.node.lease_views(), "the first lease has run out")
        wait_for(lambda: bench.node.progressing, "the timer turns")
    finally:
        disk.set()
        blocked.join()
    assert [view.job_uid for view in bench.node.lease_views()] == ["other"]

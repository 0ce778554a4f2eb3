"""What an agent exposes: as many series however many GPUs, sums that are right, and counters that never fall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.recording_gpu import RecordingGpu, RecordingSet
from tests.doubles.recording_node import gpu_uuid, wait_for

from perseus_agent.clocks.governor import GovernorLimits
from perseus_agent.clocks.gpu_worker import WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.telemetry import ServingEngine, TelemetryHub
from perseus_agent.devices.base import Controllability, EnergyReading
from perseus_agent.devices.energy import EnergyMeter
from perseus_agent.node.leases import LeaseRequest, PodName
from perseus_agent.node.node import Node
from perseus_agent.pods.pod_resources import Allocation
from perseus_agent.servers.engine_metrics import ENGINE_SERIES
from perseus_agent.servers.metrics import GPU_SERIES, SERIES, NodeCollector
from perseus_core.leases import RestingClock
from perseus_core.power_policy import PowerPolicy
from perseus_core.serving import ClockReason
from perseus_proto.engine_hello import EngineHello

LIMITS = WorkerLimits(GovernorLimits(0.0, 0.05), 0.01, 0.02)
Found = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels."""


class Bench:
    """A node, and a kubelet that gives all its GPUs to every pod."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.gpus = [RecordingGpu(gpu_uuid(number)) for number in range(gpus)]
        self.hub = TelemetryHub(64)
        journal, _ = Journal.open(folder / f"journal-{gpus}", "boot")
        self.node = Node(RecordingSet(self.gpus), journal, self, self.hub, LIMITS)

    def allocation(self, _namespace: str, _name: str, _published: Mapping[str, str]) -> Allocation:
        return Allocation(tuple(gpu.uuid for gpu in self.gpus), {})

    def lease(self, job: str = "a", uid: str = "u", ttl_s: float = 60.0) -> None:
        pod = PodName(f"pod-{uid}", "ns", f"pod-{uid}")
        self.node.acquire(LeaseRequest(uid, f"ns/{job}", 1, ttl_s, [pod], RestingClock(900)))

    def series(self, *, per_gpu: bool = False) -> Found:
        collector = NodeCollector(self.node, self.hub, "n", per_gpu=per_gpu)
        samples = [(s.name, frozenset(s.labels.items()), s.value) for f in collector.collect() for s in f.samples]
        found = {(name, labels): value for name, labels, value in samples}
        assert len(found) == len(samples), "Prometheus takes each series once"
        return found

    def value(self, name: str, *, per_gpu: bool = False, **labels: str) -> float:
        """The sum of the series of a name that have these labels."""
        found = [v for (n, own), v in self.series(per_gpu=per_gpu).items() if n == name and labels.items() <= set(own)]
        assert found, name
        return sum(found)


@contextmanager
def at_work(folder: Path, gpus: int) -> Iterator[Bench]:
    """All GPUs locked for a job, and read once."""
    bench = Bench(folder, gpus)
    bench.node.start()
    try:
        bench.lease()
        workers = bench.node.workers.values()
        wait_for(lambda: all(worker.governor.applied == 900 for worker in workers), "the clocks are locked")
        draws_mw = bench.gpus[0].power_mw()
        wait_for(lambda: all(worker.power_mw == draws_mw for worker in workers), "their power is read since")
        wait_for(lambda: all(worker.meter.total_mj is not None for worker in workers), "their energy is read")
        yield bench
    finally:
        bench.node.drain(60)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Two GPUs whose threads do not run: only a test changes what is read of them."""
    return Bench(tmp_path, 2)


def test_the_number_of_series_does_not_depend_on_the_number_of_gpus(tmp_path: Path) -> None:
    with at_work(tmp_path, 1) as one, at_work(tmp_path, 8) as eight:
        assert one.series().keys() == eight.series().keys()
        assert not any("gpu" in dict(labels) for _, labels in eight.series())
        of_gpus = eight.series(per_gpu=True).keys() - eight.series().keys()
        assert {name for name, _ in of_gpus} <= {series.name for series in GPU_SERIES}
        assert len({dict(labels)["gpu"] for _, labels in of_gpus}) == 8


def test_a_node_is_the_sum_of_its_gpus(tmp_path: Path) -> None:
    with at_work(tmp_path, 3) as bench:
        for worker in bench.node.workers.values():
            worker.governor.latency.measured = 7
        assert bench.value("perseus_node_gpus", state="yes") == bench.value("perseus_node_gpus") == 3
        assert bench.value("perseus_node_gpus_locked") == bench.value("perseus_node_job_gpus_under_plan") == 3
        for of_node, of_gpu in (
            ("perseus_node_gpu_power_watts", "perseus_gpu_power_watts"),
            ("perseus_node_job_gpu_power_watts", "perseus_gpu_power_watts"),
            ("perseus_agent_clock_switches_total", "perseus_gpu_clock_switches_total"),
        ):
            assert bench.value(of_node) == pytest.approx(bench.value(of_gpu, per_gpu=True)), of_node
            assert bench.value(of_node) > 0, of_node


def test_every_described_series_can_appear(tmp_path: Path) -> None:
    with at_work(tmp_path, 1) as bench:
        for worker in bench.node.workers.values():
            worker.governor.policy.latest = PowerPolicy(enforced=("MAX_Q",), floor_w=300)
        found = {name for name, _ in bench.series(per_gpu=True)}
    # They need a rank.
    waiting = {"perseus_agent_plan_age_seconds", "perseus_agent_mark_lead_seconds"}
    waiting |= {"perseus_gpu_rank_info", "perseus_gpu_mark_lead_seconds"}
    assert found == {series.name for series in (*SERIES, *GPU_SERIES)} - waiting


def test_waits_at_the_least_clock_and_their_price_are_added_up(bench: Bench) -> None:
    for worker, seconds in zip(bench.node.workers.values(), (90, 30), strict=True):
        idle = worker.idle
        idle.low_us, idle.late_us, idle.saved_mj = seconds * 1_000_000, seconds * 5_000, seconds * 60_000
    assert bench.value("perseus_agent_idle_clock_seconds_total") == 120
    assert bench.value("perseus_agent_idle_late_seconds_total") == pytest.approx(0.6)
    assert bench.value("perseus_agent_idle_saved_joules_total") == 7_200


def test_extremes_and_mean_are_of_the_jobs_gpus_that_answer(bench: Bench) -> None:
    bench.lease()
    bench.node._lease_clocks.ask_kubelet()
    fast, slow = bench.node.workers.values()
    fast.clock_mhz, slow.clock_mhz, fast.power_mw, slow.power_mw = 1200, 600, 300_000, 100_000
    clocks = [bench.value(f"perseus_node_job_clock_{which}_hertz") for which in ("lowest", "mean", "highest")]
    assert clocks == [600e6, 900e6, 1200e6]
    slow.governor.declare_lost("it fell off the bus")
    clocks = [bench.value(f"perseus_node_job_clock_{which}_hertz") for which in ("lowest", "mean", "highest")]
    assert clocks == [1200e6] * 3
    assert bench.value("perseus_node_gpu_power_watts") == bench.value("perseus_node_job_gpu_power_watts") == 300
    assert bench.value("perseus_node_gpus", state="lost") == bench.value("perseus_node_job_gpus_not_controllable") == 1
    assert bench.value("perseus_node_gpus", state="unknown") == 1, "its job has not been able to ask yet"


def test_gpus_are_counted_by_the_profiles_that_their_driver_enforces(bench: Bench) -> None:
    first, second = (worker.governor.policy for worker in bench.node.workers.values())
    first.latest, second.latest = PowerPolicy(("COMPUTE",), ("COMPUTE", "MAX_Q")), PowerPolicy(("MAX_P",), ("MAX_Q",))
    counted = {dict(labels)["profile"]: n for (_, labels), n in bench.series().items() if "profile" in dict(labels)}
    assert counted == {"COMPUTE": 1, "MAX_Q": 2}, "what is only requested is not in force"


def test_floors_of_power_smoothing_are_added_up_and_absent_where_there_is_none(bench: Bench) -> None:
    first, second = (worker.governor.policy for worker in bench.node.workers.values())
    first.latest, second.latest = PowerPolicy(("MAX_Q",)), None
    assert "perseus_node_gpu_power_floor_watts" not in {name for name, _ in bench.series()}
    first.latest, second.latest = PowerPolicy(floor_w=400), PowerPolicy(floor_w=300)
    assert bench.value("perseus_node_gpu_power_floor_watts") == 700


def test_a_lock_that_nobody_wants_is_counted(bench: Bench) -> None:
    assert bench.value("perseus_node_gpus_locked") == 0
    forgotten, _ = bench.node.workers.values()
    forgotten.governor.applied = 900
    assert bench.value("perseus_node_gpus_locked_without_rank") == 1
    bench.lease()
    bench.node._lease_clocks.ask_kubelet()
    assert bench.value("perseus_node_gpus_locked") == 1
    assert bench.value("perseus_node_gpus_locked_without_rank") == 0


def test_the_gpus_of_an_engine_are_those_of_its_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease names none: engines are served without a plan."""
    served, idle = bench.node.workers.values()
    served.governor.applied, served.clock_mhz = 900, 900
    bench.node.acquire(LeaseRequest("u", "ns/chat", 1, 60.0, [PodName("pod", "ns", "pod")]))
    assert bench.value("perseus_node_gpus_locked_without_rank") == 1
    engine = ServingEngine("u", "pod", 7, EngineHello("vllm", "1", "model", ""), (served.uuid,))
    monkeypatch.setattr(bench.node, "engines", lambda: [engine])
    assert bench.value("perseus_node_gpus_locked_without_rank") == 0
    assert bench.value("perseus_node_job_gpus") == 1
    assert bench.value("perseus_node_job_clock_mean_hertz") == 900e6
    idle.governor.applied = 900
    assert bench.value("perseus_node_gpus_locked_without_rank") == 1


def test_two_leases_of_one_name_are_one_series(bench: Bench) -> None:
    bench.lease(uid="deleted", ttl_s=1.0)
    bench.lease(uid="made-again", ttl_s=60.0)
    assert bench.value("perseus_agent_lease_remaining_seconds") > 1.0


def test_without_a_reading_there_is_no_power(bench: Bench) -> None:
    assert "perseus_node_gpu_power_watts" not in {name for name, _ in bench.series()}
    bench.node.workers[gpu_uuid(0)].governor.controllability = Controllability.MIG
    assert bench.value("perseus_node_gpus", state="mig") == 0, "not before it has been read"


def test_a_node_that_serves_nothing_has_no_series_of_engines(bench: Bench) -> None:
    names = {series.name for series in ENGINE_SERIES}
    assert not names & {name for name, _ in bench.series()}
    bench.node.page_faults = {"pod": "its page is too long"}
    assert bench.value("perseus_agent_metrics_pages", page="failed") == 1
    totals = bench.node.engine_totals
    totals.held("ImpossibleSample", 1_500_000)
    totals.sampled(possible=False)
    totals.boosted(80_000)
    assert {name for name, _ in bench.series()} >= names
    assert bench.value("perseus_agent_engine_seconds_total", limited_by="ImpossibleSample") == 1.5
    assert bench.value("perseus_agent_engine_samples_refused_total") == 1
    assert bench.value("perseus_agent_boost_seconds", quantile="0.99") == 0.08
    reasons = [dict(labels)["limited_by"] for name, labels in bench.series() if "limited_by" in dict(labels)]
    assert sorted(reasons) == sorted(reason.value for reason in ClockReason), "a counter begins at 0"


Step = tuple[int, int]
"""A GPU, and by how much its counter moves before it is read; negative: the driver was loaded anew."""


@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 10**6)), max_size=40),
)
def test_a_sum_of_energy_never_falls_and_never_holds_more_than_was_used(
    pasts_mj: Sequence[int], steps: Sequence[Step]
) -> None:
    """However late a GPU is first read, and whatever its counter held by then."""
    counters, meters = list(pasts_mj), [EnergyMeter() for _ in pasts_mj]
    shown_mj = used_mj = 0
    for time_us, (number, rise_mj) in enumerate(steps, 1):
        gpu = number % len(counters)
        read_before = meters[gpu].total_mj is not None
        counters[gpu] = 0 if rise_mj < 0 else counters[gpu] + rise_mj
        if read_before:
            used_mj += max(rise_mj, 0)
        meters[gpu].add(EnergyReading(time_us, counters[gpu]))
        total_mj = sum(meter.used_mj for meter in meters)
        assert total_mj >= shown_mj
        assert total_mj == used_mj
        shown_mj = total_mj

"""A lease with a clock: all GPUs of its pods run at it, whether or not a process of theirs is connected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.doubles.recording_gpu import RecordingGpu, RecordingSet
from tests.doubles.recording_node import gpu_uuid, wait_for

from perseus_agent.clocks.governor import GovernorLimits
from perseus_agent.clocks.gpu_worker import WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.devices.base import Controllability
from perseus_agent.errors import DeviceBusy, InvalidRequest, KubeletUnavailable
from perseus_agent.keeper.ledger import UNWATCHED_S, Ledger
from perseus_agent.node.leases import LeaseRequest, PodName
from perseus_agent.node.node import Node
from perseus_agent.pods.gpu_names import Undrivable
from perseus_agent.pods.pod_resources import Allocation
from perseus_core.leases import LeasedGpu, RestingClock

LIMITS = WorkerLimits(GovernorLimits(0.0, 0.05), 0.01, 0.02)


class Bench:
    """A node of four GPUs, and the kubelet that gives them to pods."""

    def __init__(self, folder: Path) -> None:
        self.gpus = [RecordingGpu(gpu_uuid(number)) for number in range(4)]
        self.ledger = Ledger.create()
        self.ledger.watched_for(3600)
        self.journal, _ = Journal.open(folder / "journal", "boot", self.ledger)
        self.given: dict[str, Allocation | None] = {
            "pod-0": Allocation((gpu_uuid(0), gpu_uuid(1)), {}),
            "pod-1": Allocation((gpu_uuid(2),), {}),
        }
        self.silent = False
        self.published: Mapping[str, str] = {}
        """With which the kubelet was asked last."""
        self.now_s = 100.0
        """By the clock of the leases."""
        self.node = Node(
            RecordingSet(self.gpus), self.journal, self, TelemetryHub(64), LIMITS, monotonic_s=lambda: self.now_s
        )
        self.node.start()

    def allocation(self, _namespace: str, name: str, published: Mapping[str, str]) -> Allocation | None:
        if self.silent:
            raise KubeletUnavailable("it is being upgraded")
        self.published = published
        return self.given[name]

    def lease(
        self,
        clock_mhz: int = 900,
        *pods: str,
        epoch: int = 1,
        job: str = "job",
        ttl_s: float = 60,
        keep_s: float = 0,
    ) -> None:
        names = [PodName(pod, "ns", pod) for pod in pods or ("pod-0", "pod-1")]
        self.node.acquire(LeaseRequest(job, f"ns/{job}", epoch, ttl_s, names, RestingClock(clock_mhz, keep_s)))

    def wait_locked(self, *clocks: int | None) -> None:
        wait_for(lambda: self.locked == list(clocks), f"clocks {clocks}")

    @property
    def locked(self) -> list[int | None]:
        return [gpu.locked_mhz for gpu in self.gpus]

    @property
    def used_mj(self) -> Mapping[str, int]:
        """What a renewal of the lease says of the pods' energy."""
        return self.node.renew("job", 1, 60).energies_mj

    @property
    def reported(self) -> list[LeasedGpu]:
        return sorted(self.node.renew("job", 1, 60).gpus, key=lambda gpu: (gpu.pod_uid, gpu.uuid))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.node.drain(60) == []
    assert bench.locked == [None] * 4
    assert not bench.journal.locked


def test_gpus_of_pods_without_a_process_run_at_the_clock_until_the_lease_is_released(bench: Bench) -> None:
    bench.lease()
    bench.wait_locked(900, 900, 900, None)
    assert bench.journal.locked == {gpu_uuid(number) for number in range(3)}
    wait_for(lambda: [gpu.applied_mhz for gpu in bench.reported] == [900] * 3, "the clocks are reported")
    assert {(gpu.pod_uid, gpu.fault) for gpu in bench.reported} == {("pod-0", ""), ("pod-1", "")}
    assert bench.node.release("job", 1) == sorted(gpu_uuid(number) for number in range(3))
    assert bench.locked == [None] * 4


def test_a_lease_that_runs_out_leaves_no_clock(bench: Bench) -> None:
    bench.lease()
    bench.wait_locked(900, 900, 900, None)
    bench.now_s += 60
    bench.wait_locked(None, None, None, None)


def test_another_clock_replaces_the_first_and_none_ends_it(bench: Bench) -> None:
    bench.lease(900)
    bench.wait_locked(900, 900, 900, None)
    bench.lease(600)
    bench.wait_locked(600, 600, 600, None)
    bench.lease(0)
    bench.wait_locked(None, None, None, None)
    assert bench.reported == []


def test_gpus_of_a_pod_that_leaves_the_lease_are_let_go_alone(bench: Bench) -> None:
    bench.lease()
    bench.wait_locked(900, 900, 900, None)
    bench.lease(900, "pod-1")
    bench.wait_locked(None, None, 900, None)
    assert [gpu.pod_uid for gpu in bench.reported] == ["pod-1"]


def test_the_kubelets_latest_answer_counts(bench: Bench) -> None:
    bench.lease()
    bench.wait_locked(900, 900, 900, None)
    bench.given["pod-0"] = Allocation((gpu_uuid(3),), {})  # another pod of the same name
    bench.wait_locked(None, None, 900, 900)
    bench.given["pod-0"] = Allocation((), {gpu_uuid(3): Undrivable.SHARED})
    bench.wait_locked(None, None, 900, None)
    assert bench.reported[0] == LeasedGpu(gpu_uuid(3), "pod-0", 0, Undrivable.SHARED.value)
    bench.given["pod-0"] = None
    wait_for(lambda: bench.reported[0].fault == "the kubelet does not know this pod", "it is said")
    bench.given["pod-0"] = Allocation((), {})  # a launcher
    wait_for(lambda: bench.reported[0] == LeasedGpu("", "pod-0", 0, ""), "it is said")


def test_the_latest_lease_says_what_is_published_of_its_gpus(bench: Bench) -> None:
    pods = [PodName("pod-1", "ns", "pod-1")]
    for named in ([("node-1/gpu-0", gpu_uuid(2))], []):
        bench.node.acquire(LeaseRequest("job", "ns/job", 1, 60, pods, RestingClock(900), named))
        wait_for(lambda named=named: bench.published == dict(named), "the kubelet is asked with it")  # type: ignore[misc]
    bench.wait_locked(None, None, 900, None)


def test_a_kubelet_that_does_not_answer_changes_nothing_and_is_asked_again(bench: Bench) -> None:
    bench.lease(900, "pod-1")
    bench.wait_locked(None, None, 900, None)
    bench.silent = True
    bench.lease(900)
    wait_for(lambda: bool(bench.reported[0].fault), "what is not known is said")
    assert bench.reported == [
        LeasedGpu("", "pod-0", 0, "it is being upgraded"),
        LeasedGpu(gpu_uuid(2), "pod-1", 900, ""),
    ]
    assert bench.locked == [None, None, 900, None]
    bench.silent = False
    bench.wait_locked(900, 900, 900, None)


def test_a_clock_that_no_gpu_supports_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.lease()
    bench.wait_locked(900, 900, 900, None)
    with pytest.raises(InvalidRequest, match="clock_mhz: no GPU of this node supports 901 MHz"):
        bench.lease(901)
    assert bench.locked == [900, 900, 900, None]


def test_a_gpu_whose_driver_is_busy_is_tried_again(bench: Bench) -> None:
    bench.gpus[2].fault = DeviceBusy("in use")
    bench.lease()
    bench.wait_locked(900, 900, None, None)
    governor = bench.node.workers[gpu_uuid(2)].governor
    wait_for(lambda: governor.controllability_message == "in use", "the driver has refused for as long as is tried")
    bench.gpus[2].fault = None
    bench.wait_locked(900, 900, 900, None)


def test_a_gpu_that_may_not_be_set_is_named_with_the_reason(bench: Bench) -> None:
    bench.gpus[0].state = Controllability.NO_PERMISSION, "the driver refuses"
    bench.lease()
    bench.wait_locked(None, 900, 900, None)
    wait_for(lambda: bench.reported[0].fault == "the driver refuses", "it is said")
    bench.gpus[0].state = Controllability.YES, ""
    bench.wait_locked(900, 900, 900, None)


def test_a_clock_that_stays_is_never_the_default_when_its_lease_runs_out(bench: Bench) -> None:
    bench.lease(ttl_s=60, keep_s=30)
    bench.wait_locked(900, 900, 900, None)
    bench.now_s += 60
    wait_for(lambda: bench.node.leases.expiries == 1, "the lease has run out")
    bench.given["pod-0"] = Allocation((), {})  # the pod has ended
    bench.wait_locked(None, None, 900, None)
    assert [call.mhz for call in bench.gpus[2].calls] == [900], "it never was at its default clocks"
    bench.now_s += 30
    bench.wait_locked(None, None, None, None)


def test_the_next_operator_takes_over_what_stays(bench: Bench) -> None:
    bench.lease(keep_s=60)
    bench.wait_locked(900, 900, 900, None)
    bench.now_s += 60
    wait_for(lambda: bench.node.leases.expiries == 1, "the lease has run out")
    bench.lease(epoch=2)
    assert [[call.mhz for call in gpu.calls] for gpu in bench.gpus[:3]] == [[900]] * 3
    bench.lease(0, epoch=2)
    bench.wait_locked(None, None, None, None)


def test_another_job_of_the_same_pods_ends_what_stays(bench: Bench) -> None:
    bench.lease(keep_s=60)
    bench.wait_locked(900, 900, 900, None)
    bench.now_s += 60
    wait_for(lambda: bench.node.leases.expiries == 1, "the lease has run out")
    bench.lease(600, "pod-1", job="other")
    bench.wait_locked(None, None, 600, None)


def test_gpus_at_rest_go_back_to_default_clocks_too_when_no_keeper_watches(bench: Bench) -> None:
    bench.lease(900)
    bench.wait_locked(900, 900, 900, None)
    bench.ledger.watched_for(-UNWATCHED_S - 1)
    bench.wait_locked(None, None, None, None)
    wait_for(lambda: all("no clock keeper" in gpu.fault for gpu in bench.reported), "the lease says why")
    bench.ledger.watched_for(3600)
    bench.wait_locked(900, 900, 900, None)


@pytest.mark.parametrize("clock_mhz", [0, 900])
def test_a_lease_says_what_all_gpus_of_its_pods_have_used(bench: Bench, clock_mhz: int) -> None:
    for number, gpu in enumerate(bench.gpus):
        gpu.energy_mj += 10.0**9 * 10**number
    bench.lease(clock_mhz)
    wait_for(lambda: set(bench.used_mj) == {"pod-0", "pod-1"}, "the kubelet has said whose GPUs they are")
    wait_for(lambda: bench.used_mj["pod-0"] > 11 * 10**9, "both GPUs are counted")
    wait_for(lambda: bench.used_mj["pod-1"] > 10**11, "its GPU is counted")
    before_mj = bench.used_mj
    assert before_mj["pod-0"] // 10**9 == 11
    assert before_mj["pod-1"] // 10**9 == 100
    wait_for(lambda: all(bench.used_mj[pod] > used_mj for pod, used_mj in before_mj.items()), "the counters go on")
    bench.lease(clock_mhz, "pod-1")
    wait_for(lambda: set(bench.used_mj) == {"pod-1"}, "it says nothing of a pod that left it")


def test_of_a_pod_with_a_gpu_that_is_not_counted_whole_a_lease_says_nothing(bench: Bench) -> None:
    bench.gpus[0].has_energy = False
    bench.given["shared"] = Allocation((gpu_uuid(2),), {gpu_uuid(3): Undrivable.SHARED})
    bench.given["elsewhere"] = Allocation((gpu_uuid(2), gpu_uuid(9)), {})
    bench.given["launcher"] = Allocation((), {})
    bench.given["unknown"] = None
    bench.lease(0, "pod-0", "pod-1", "shared", "elsewhere", "launcher", "unknown")
    wait_for(lambda: set(bench.used_mj) == {"pod-1"}, "the counter that was read before has stopped")
    bench.gpus[0].has_energy = True
    wait_for(lambda: set(bench.used_mj) == {"pod-0", "pod-1"}, "it goes on")
    bench.given["unknown"] = Allocation((gpu_uuid(3),), {})
    wait_for(lambda: set(bench.used_mj) == {"pod-0", "pod-1", "unknown"}, "the kubelet is asked again")

"""Which GPU a process may drive: its pod's own, alone, and on this node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perseus_agent.errors import PeerRefused, PeerUnknown
from perseus_agent.node.leases import PodName
from perseus_agent.node.processes import ServingSession, choose_gpu, own_part
from perseus_agent.pods.gpu_names import Undrivable
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_agent.pods.pod_resources import Allocation
from perseus_proto.engine_channel import EngineReader
from perseus_proto.engine_hello import EngineHello
from perseus_proto.hello import Reason

KNOWN = {"GPU-a", "GPU-b", "GPU-c"}


def holding(*uuids: str, **undrivable: Undrivable) -> Allocation:
    return Allocation(uuids, {name.replace("_", "-"): why for name, why in undrivable.items()})


@pytest.mark.parametrize(
    ("allocation", "hint", "chosen"),
    [
        (holding("GPU-a"), "", "GPU-a"),
        (holding("GPU-a"), "GPU-a", "GPU-a"),
        (holding("GPU-a", "GPU-b"), "GPU-b", "GPU-b"),
        (holding("GPU-a", MIG_1=Undrivable.MIG), "", "GPU-a"),
    ],
)
def test_a_pod_s_own_gpu_is_chosen(allocation: Allocation, hint: str, chosen: str) -> None:
    assert choose_gpu(allocation, hint, KNOWN) == chosen


@pytest.mark.parametrize(
    ("allocation", "hint", "reason"),
    [
        (None, "", Reason.NO_GPU),
        (holding(), "", Reason.NO_GPU),
        (holding("GPU-a"), "GPU-b", Reason.GPU_NOT_OWNED),
        (None, "GPU-b", Reason.NO_GPU),
        (holding("GPU-a", "GPU-b"), "", Reason.GPU_AMBIGUOUS),
        (holding(MIG_1=Undrivable.MIG), "", Reason.GPU_SHARED),
        (holding("GPU-a", GPU_b=Undrivable.SHARED), "GPU-b", Reason.GPU_SHARED),
        (holding("GPU-z"), "", Reason.NO_GPU),
    ],
)
def test_everything_else_is_refused_with_its_reason(allocation: Allocation | None, hint: str, reason: Reason) -> None:
    with pytest.raises(PeerRefused) as refusal:
        choose_gpu(allocation, hint, KNOWN)
    assert refusal.value.reason is reason


POD = PodName("uid", "ns", "pod", frozenset({("1" * 64, "trainer"), ("2" * 64, "sidecar")}))
BOTH = Allocation(("GPU-a", "GPU-b"), {"MIG-1": Undrivable.MIG}, {"trainer": frozenset({"GPU-a", "MIG-1"})})


def test_of_a_pod_with_several_containers_only_the_holder_drives_a_gpu() -> None:
    assert own_part(BOTH, PodProcess("uid", "1" * 64), POD) == Allocation(("GPU-a",), {"MIG-1": Undrivable.MIG})
    assert own_part(BOTH, PodProcess("uid", "2" * 64), POD) == Allocation((), {})
    with pytest.raises(PeerUnknown, match="has not yet named container 333333333333 of pod ns/pod"):
        own_part(BOTH, PodProcess("uid", "3" * 64), POD)


@pytest.mark.parametrize(
    ("process", "pod"),
    [(PodProcess("uid", None), POD), (PodProcess("uid", "3" * 64), PodName("uid", "ns", "pod"))],
    ids=["a runtime whose names are unknown", "a pod whose containers the operator does not name"],
)
def test_where_containers_cannot_be_distinguished_the_pod_decides(process: PodProcess, pod: PodName) -> None:
    assert own_part(BOTH, process, pod) == BOTH


@pytest.fixture
def engine() -> Iterator[ServingSession]:
    channel = EngineReader.create()
    peer = Peer(1, 0, 0, PodProcess("uid", None), None)
    yield ServingSession(peer, EngineHello("vllm", "1", "model", ""), channel, lambda: None)
    channel.close()


def test_an_engine_drives_all_gpus_of_its_container(engine: ServingSession) -> None:
    assert engine.choose(holding("GPU-a", "GPU-b"), KNOWN) == ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("allocation", "reason", "named"),
    [
        (None, Reason.NO_GPU, "no devices"),
        (holding(), Reason.NO_GPU, "holds no GPU"),
        (holding("GPU-a", "GPU-z"), Reason.NO_GPU, "GPU-z"),
        (holding("GPU-a", MIG_1=Undrivable.MIG), Reason.GPU_SHARED, "MIG-1"),
        (holding("GPU-a", GPU_b=Undrivable.SHARED), Reason.GPU_SHARED, "GPU-b"),
    ],
)
def test_an_engine_drives_none_if_it_may_not_drive_one(
    engine: ServingSession, allocation: Allocation | None, reason: Reason, named: str
) -> None:
    with pytest.raises(PeerRefused, match=named) as refusal:
        engine.choose(allocation, KNOWN)
    assert refusal.value.reason is reason

"""What ResourceSlices say of a node's GPUs, which is sent with a lease: true for its pods, or nothing."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from tests.unit.operator.conftest import LIMITS, Job, epochs_of
from tests.unit.operator.test_job_runner import session_of
from tests.unit.operator.test_listing import served

from perseus_core import keys
from perseus_operator.clients.agents.messages import lease_of
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.errors import KubeError, KubeForbidden
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.nodes.actions import Acquire
from perseus_operator.nodes.named_gpus import NamedGpu, named_gpus
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Pod
from perseus_proto.v1alpha1 import agent_pb2

BEFORE, WRITTEN, LATER = "2026-11-28T08:00:00Z", "2026-11-28T09:00:00Z", "2026-11-28T09:00:01Z"
UUIDS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(3)]


def slice_of(
    *devices: tuple[str, str], generation: int = 1, driver: str = keys.DRA_DRIVER, written: str = WRITTEN
) -> dict[str, Any]:
    """As NVIDIA's driver publishes ``(name, UUID)``."""
    return {
        "metadata": {"name": f"slice-{generation}", "managedFields": [{"time": BEFORE}, {"time": written}]},
        "spec": {
            "driver": driver,
            "nodeName": "node-0",
            "pool": {"name": "node-0", "generation": generation, "resourceSliceCount": 1},
            "devices": [
                {"name": name, "attributes": {"type": {"string": "gpu"}, "uuid": {"string": uuid}}}
                for name, uuid in devices
            ],
        },
    }


def pod(created: str, *, claims_devices: bool = True) -> Pod:
    return Pod("pod-0", "ns", "t-0", "node-0", "job", {}, created=created, claims_devices=claims_devices)


def test_the_newest_slices_of_the_driver_name_its_gpus() -> None:
    part = {"name": "gpu-1-mig", "attributes": {"type": {"string": "mig"}, "uuid": {"string": "MIG-1"}}}
    newest = slice_of(("gpu-0", UUIDS[1]), ("gpu-1", UUIDS[0]), generation=2)
    newest["spec"]["devices"] += [part, {"name": "no-attributes"}]
    left_over, foreign = (
        slice_of(("gpu-0", UUIDS[0])),
        slice_of(("gpu-0", UUIDS[2]), driver="gpu.example", generation=9),
    )
    found = named_gpus([foreign, newest, left_over], [pod(LATER)])
    assert found == (NamedGpu("node-0", "gpu-0", UUIDS[1]), NamedGpu("node-0", "gpu-1", UUIDS[0]))


@pytest.mark.parametrize("starts", [[WRITTEN], [BEFORE], [LATER, BEFORE], []])
def test_a_slice_says_nothing_of_a_pod_that_an_earlier_driver_may_have_prepared(starts: list[str]) -> None:
    assert named_gpus([slice_of(("gpu-0", UUIDS[0]))], map(pod, starts)) == ()


def test_a_slice_of_which_it_is_not_known_when_it_was_written_says_nothing() -> None:
    stripped = slice_of(("gpu-0", UUIDS[0]))
    del stripped["metadata"]["managedFields"]
    assert named_gpus([stripped], [pod(LATER)]) == named_gpus([], [pod(LATER)]) == ()


def test_a_pod_has_claims_by_its_spec_or_by_the_scheduler_and_its_age_by_the_api_server() -> None:
    def parsed(spec: dict[str, Any], status: dict[str, Any]) -> Pod:
        metadata = {"uid": "u", "namespace": "ns", "name": "p", "labels": {keys.LABEL_JOB: "job"}}
        times = {"creationTimestamp": BEFORE}
        found = pod_of({"metadata": {**metadata, **times}, "spec": {"nodeName": "n", **spec}, "status": status})
        assert found is not None
        return found

    a_node_whose_clock_is_ahead = {"startTime": "2036-01-01T00:00:00Z"}
    for claiming in (
        parsed({"resourceClaims": [{"name": "gpu"}]}, a_node_whose_clock_is_ahead),
        parsed({}, {**a_node_whose_clock_is_ahead, "extendedResourceClaimStatus": {"resourceClaimName": "c"}}),
    ):
        assert claiming.claims_devices
        assert named_gpus([slice_of(("gpu-0", UUIDS[0]))], [claiming]) == ()
    assert not parsed({}, a_node_whose_clock_is_ahead).claims_devices


class Slices:
    """An API server that has one slice, of the node that it is asked about."""

    async def answer(self, request: web.Request) -> web.Response:
        assert request.path == "/apis/resource.k8s.io/v1/resourceslices"
        assert request.query["fieldSelector"] == "spec.nodeName=node-0"
        return web.json_response({"items": [slice_of(("gpu-0", UUIDS[1]))]})


async def test_the_slices_of_one_node_are_read() -> None:
    async with served(Slices()) as kube:  # type: ignore[arg-type]
        assert named_gpus(await kube.resource_slices("node-0"), [pod(LATER)]) == (
            NamedGpu("node-0", "gpu-0", UUIDS[1]),
        )


@pytest.mark.parametrize(
    ("allowed", "claims", "error", "sent"),
    [
        (True, True, None, (NamedGpu("node-0", "gpu-0", UUIDS[1]),)),
        (True, True, KubeForbidden("403"), ()),
        (True, False, None, None),
        (False, True, None, None),
    ],
)
async def test_a_lease_carries_what_is_published_and_never_waits_for_the_right_to_read_it(
    allowed: bool, claims: bool, error: KubeError | None, sent: tuple[NamedGpu, ...] | None
) -> None:
    asked, carried = [], []

    async def resource_slices(node: str) -> list[Any]:
        asked.append(node)
        if error:
            raise error
        return [slice_of(("gpu-0", UUIDS[1]))]

    async def acquire(*_: Any, named_gpus: Any, **__: Any) -> Any:
        carried.append(tuple(named_gpus))
        return lease_of(agent_pb2.Lease(description=1))

    async def describe(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(ranks=(), clocks_mhz={}, uncontrollable={}, gpus={}, schedules={}, engines=())

    job = Job()
    job.state.pods_observed(Selection((pod(LATER, claims_devices=claims),)), {"node-0": "10.0.0.1:1"}, wall_s=0.0)
    services = SimpleNamespace(
        monotonic_s=lambda: 0.0,
        agents=SimpleNamespace(acquire=acquire, describe=describe, watch=nothing),
        kube=SimpleNamespace(resource_slices=resource_slices),
        resource_slices=allowed,
        limits=LIMITS,
        epochs=epochs_of(1),
        metrics=Metrics(),
    )
    session = session_of(job, services)
    await session.command(job.nodes[0], Acquire("node-0"))
    for stream in session.streams:
        stream.cancel()
    assert carried == [sent or ()]
    assert asked == ([] if sent is None else ["node-0"]), "only where a pod has claims, and where it may be read"


@asynccontextmanager
async def nothing(*_: Any, **__: Any) -> Any:
    yield

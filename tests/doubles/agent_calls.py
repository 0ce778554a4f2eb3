"""Calls of an agent as its operator makes them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from tests.doubles.recording_node import JOB, RecordingNode, plan_set_of, pod_uid, wait_for

from perseus_agent.servers.grpc_service import ERROR_METADATA
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

PLANS = plan_set_of([[[1200, 900, 1200, 900], [600] * 4]])


@contextlib.contextmanager
def freed(node: RecordingNode, pods: int = 0) -> Iterator[stubs.AgentStub]:
    """A stub of a node's agent; in the end leases, trainers and so many pods go, and GPUs are at default clocks."""
    with node.stub() as stub:
        yield stub
        for lease in describe(stub).leases:
            stub.ReleaseLease(messages.ReleaseLeaseRequest(job_uid=lease.job_uid, epoch=lease.epoch))
    node.kill_trainers()
    for number in range(pods):
        node.kubelet.remove(pod_uid(number))
    wait_for(node.all_default, "default clocks between tests")


def acquire(stub: Any, pods: list[messages.Pod], job: str = JOB, epoch: int | None = None, ttl_ms: int = 60_000) -> Any:
    request = messages.AcquireLeaseRequest(
        job_uid=job, job_name=f"ns/{job}", epoch=epoch or time.time_ns(), ttl_ms=ttl_ms, pods=pods
    )
    return stub.AcquireLease(request)


def select(stub: Any, lease: Any, point: int = 0, plan_id: str = PLANS.plan_id, from_iteration: int = 0) -> Any:
    return stub.SelectPlan(
        messages.SelectPlanRequest(
            job_uid=lease.job_uid,
            epoch=lease.epoch,
            plan_id=plan_id,
            selections=[messages.Selection(data_parallel_rank=0, point=point)],
            from_iteration=from_iteration,
        )
    )


def push(
    stub: Any, lease: Any, plan_set: messages.PlanSet = PLANS, changes: Sequence[messages.ClockChange] = ()
) -> Any:
    named = {"job_uid": lease.job_uid, "epoch": lease.epoch}
    return stub.PushPlanSet(messages.PushPlanSetRequest(**named, plan_set=plan_set, changes=changes))


def describe(stub: Any) -> Any:
    return stub.DescribeNode(messages.DescribeNodeRequest())


def joined(stub: Any) -> set[str]:
    return {rank.gpu_uuid for rank in describe(stub).ranks if rank.gpu_uuid}


def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    trailing = dict(error.value.trailing_metadata())
    return error.value.code(), trailing.get(ERROR_METADATA, ""), error.value.details()

"""How a job ends, or leaves a replica: GPUs return to their default clocks, as far as the agents answer in time."""

from __future__ import annotations

import asyncio
import logging

from perseus_operator.api.conditions import Reason
from perseus_operator.errors import AgentError, AgentUnavailable, KubeError
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.services import Services, backoff_s
from perseus_operator.nodes.node import Node
from perseus_operator.objects.formatting import counted
from perseus_operator.objects.values import JobRef

logger = logging.getLogger(__name__)


async def release_job(job: Job, services: Services) -> None:
    """Return every GPU of a job to its default clocks, and report it as an event of the PerseusJob.

    The time is bounded by ``services.release_timeout_s``. An agent that does not answer does it when its lease expires.
    """
    deadline_s = services.monotonic_s() + services.release_timeout_s
    epoch = max(services.epochs.of(job.ref.uid), job.raised_epoch)
    services.epochs.forget(job.ref.uid)
    if job.fenced is not None:
        return
    nodes = [node for node in job.nodes.values() if node.address is not None]
    released = await asyncio.gather(*(_release(job.ref, services, node, epoch, deadline_s) for node in nodes))
    services.metrics.forget_job(job.ref)
    late = [node.name for node, done in zip(nodes, released, strict=True) if done is None]
    gpus, answered = counted(sum(filter(None, released)), "GPU"), counted(len(nodes) - len(late), "node")
    message = f"Back at default clocks: {gpus} on {answered}."
    if late:
        ttl_s = services.limits.lease_ttl_s
        message += f" {len(late)} agents did not answer, first {late[0]}: their leases expire within {ttl_s:g} s."
    logger.info("%s: %s", job.ref, message)
    try:
        await services.kube.post_event(job.ref, kind="Normal", reason=Reason.CLOCKS_RELEASED.value, message=message)
    except KubeError as error:
        logger.warning("%s: event not written: %s", job.ref, error)


async def release_left_nodes(job: Job, services: Services) -> None:
    """Return the GPUs of nodes that no pod of the job is on any more to their default clocks, before another replica
    serves it: that one learns of nodes by their pods, and would leave the lease there to run out.

    An agent is asked once. One that the other replica commands already refuses.
    """
    if job.fenced is not None:
        return
    epoch = max(services.epochs.of(job.ref.uid), job.raised_epoch)
    left = [node for node in job.nodes.values() if not node.pods and node.address is not None]
    now_s = services.monotonic_s()
    await asyncio.gather(*(_release(job.ref, services, node, epoch, now_s) for node in left))


async def _release(ref: JobRef, services: Services, node: Node, epoch: int, deadline_s: float) -> int | None:
    """Number of GPUs that a node returned to default clocks; None: no answer in time."""
    failures = 0
    assert node.address is not None
    while True:
        try:
            return await services.agents.release(node.address, job_uid=ref.uid, epoch=epoch)
        except AgentUnavailable:
            pause_s = backoff_s(failures)
            failures += 1
            if services.monotonic_s() + pause_s >= deadline_s:
                return None
            await asyncio.sleep(pause_s)
        except AgentError as error:
            logger.warning("%s: node %s: %s", ref, node.name, error)
            return None

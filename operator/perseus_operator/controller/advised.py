"""How many replicas are advised for a pool, from its status: any replica of the operator says the same."""

from __future__ import annotations

from perseus_operator.api.serving.status import AdviceStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.errors import NoAdvice, UnknownJob


def advised_replicas(jobs: KnownJobs, namespace: str, name: str) -> int:
    """Return how many replicas a pool needs; at least one.

    Raises:
        UnknownJob: there is no such pool, or it is not served.
        NoAdvice: that is not known now; the message says why.
    """
    pool = jobs.pool(namespace, name)
    if pool is None:
        raise UnknownJob(f"pool: no ServingPool {name} is served in namespace {namespace}")
    advice = parse_stored(AdviceStatus, (pool.get("status") or {}).get("advice"))
    if advice is None or advice.replicas is None:
        why = "its status has no advice." if advice is None else advice.why
        raise NoAdvice(f"ServingPool {namespace}/{name}: no number of replicas is advised: {why}")
    return advice.replicas

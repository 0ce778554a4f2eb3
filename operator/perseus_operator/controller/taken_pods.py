"""Pods that a PerseusJob asks for and that carry the label of another one: a pod belongs to the one that it names.

Asked now and then, of jobs without pods: which these are follows from all pods of a namespace, and not from an event.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Final

from perseus_operator.api.job import WorkSpec
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.nodes.workloads import select
from perseus_operator.objects.values import Pod

LOOK_S: Final = 5.0
"""Between two looks."""
_MOST_PODS: Final = 500
"""Of other jobs that are looked at for one."""


async def observe_taken_pods(
    runners: Iterable[JobRunner], jobs: KnownJobs, pods_of: Mapping[tuple[str, str], Mapping[str, Pod]]
) -> None:
    """Let each job without pods know to which one those belong that it asks for.

    Args:
        runners: of the jobs.
        jobs: all that exist.
        pods_of: pods by UID, of each job that they name.
    """
    for runner in list(runners):
        if not runner.job.nodes.occupied:
            namespace = runner.ref.namespace
            names = {jobs.body(uid)["metadata"]["name"] for uid in jobs.of_namespace(namespace)} - {runner.ref.name}
            pods = chain.from_iterable(pods_of.get((namespace, name), {}).values() for name in sorted(names))
            runner.observe_taken_pods(_taken(runner.job.spec, pods))
            await asyncio.sleep(0)


def _taken(spec: WorkSpec | None, pods: Iterable[Pod]) -> tuple[str, int] | None:
    """The job that has most of the pods that a spec asks for, and how many; None: there are none."""
    if spec is None or spec.pods is None:
        return None
    owners = Counter(pod.job for pod in select(spec, islice(pods, _MOST_PODS)).pods)
    return next(iter(owners.most_common(1)), None)

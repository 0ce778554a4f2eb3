"""The part of the spec of a PerseusJob or a ServingPool that selects its pods.

The kinds are those whose worker pods ``nodes.workloads`` can recognise. API groups are left out: each kind stands
for one group.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from perseus_operator.api.schema import DNS_NAME, Rule, choice, labels, nested, text


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which pods."""

    match_labels: Mapping[str, str] = labels("Labels that a training pod carries.")


class WorkloadKind(StrEnum):
    """What makes the training pods."""

    JOB = "Job"
    JOB_SET = "JobSet"
    PYTORCH_JOB = "PyTorchJob"
    TRAIN_JOB = "TrainJob"
    MPI_JOB = "MPIJob"
    VOLCANO_JOB = "VolcanoJob"
    RAY_JOB = "RayJob"
    RAY_CLUSTER = "RayCluster"
    LEADER_WORKER_SET = "LeaderWorkerSet"


class ServerKind(StrEnum):
    """What makes the pods of replicas that serve."""

    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"
    LEADER_WORKER_SET = "LeaderWorkerSet"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A workload in the namespace of the PerseusJob."""

    kind: WorkloadKind | ServerKind = choice("Its kind; VolcanoJob is the Job of batch.volcano.sh.", WorkloadKind)
    name: str = text("Its name.", rule="the name of a workload", max_length=253, pattern=DNS_NAME)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which pods belong to the job, among those that opted in with the label perseus.energy/job."""

    selector: Selector | None = nested("Those that carry these labels.", Selector, required=False)
    reference: Reference | None = nested(
        "The workers of this workload, of its latest attempt.", Reference, required=False
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.selector) != has(self.reference)",
            "exactly one of selector and reference must be set",
            lambda w: (w.selector is None) != (w.reference is None),
        ),
    )

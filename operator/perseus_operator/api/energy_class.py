"""EnergyClass, typed: of which PerseusJobs and ServingPools are made for workloads that opt in by a label.

It is cluster-wide and written by administrators, as StorageClass and PriorityClass are. An edit concerns what is made
afterwards.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from perseus_operator.api.comparison import Comparison
from perseus_operator.api.job import Mode, Online, Straggler
from perseus_operator.api.namespaces import NamespaceSelector
from perseus_operator.api.objective import Objective, ObjectiveType
from perseus_operator.api.schema import choice, dump, integer, nested, text
from perseus_operator.api.serving.spec import ClockRange, MetricsPage, Server, ServingObjective
from perseus_operator.api.workload import ServerKind, WorkloadKind
from perseus_operator.errors import InvalidSpec
from perseus_operator.objects.values import Json


@dataclass(frozen=True, kw_only=True)
class ProfilesFrom:
    """Whose profiles the jobs of the class may read."""

    namespace: str = text(
        "Namespace of the PerseusProfiles.",
        rule="the name of a namespace",
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    )


@dataclass(frozen=True, kw_only=True)
class ServingClass:
    """What the ServingPools of the class are like; fields as in ``PoolSpec``."""

    objective: ServingObjective = nested(
        "What requests were promised; without any limit no clock is set, and limits are proposed in the pool's status.",
        ServingObjective,
        default={},
    )
    mode: Mode = choice(
        "Enforce: learn on one replica, then let the clocks of all follow their load. Canary: of one replica alone."
        " Recommend: report what would be done as far as it is known, set no clocks. Observe: set no clocks.",
        Mode,
        default=Mode.OBSERVE.value,
    )
    clocks: ClockRange = nested("Which clocks may be set.", ClockRange, default={})
    engine: MetricsPage = nested(
        "Where engines without the plugin show their metrics: a process beside the agent reads that page.",
        MetricsPage,
        default={},
    )


@dataclass(frozen=True, kw_only=True)
class ClassSpec:
    """What the PerseusJobs and ServingPools of the class are like."""

    namespace_selector: NamespaceSelector | None = nested(
        "Namespaces whose workloads may have the class; absent: all.", NamespaceSelector, required=False
    )
    objective: Objective = nested("What to choose from the time-energy frontier.", Objective, default={})
    mode: Mode = choice(
        "Enforce: set clocks. Canary: of one pipeline first, then of all or none. Recommend: set no clocks. Observe:"
        " set none, and predict what plans would save.",
        Mode,
        default=Mode.OBSERVE.value,
    )
    straggler: Straggler = nested("What to do about slow pipelines.", Straggler, default={})
    profiling: Online = nested("How a profile is measured that does not exist yet.", Online, default={})
    profiles_from: ProfilesFrom | None = nested(
        "Whose PerseusProfiles its jobs and pools may read, by name, where their own namespace has none of that name;"
        " they are never written by these. The only way to a profile of another namespace. Absent: no other's.",
        ProfilesFrom,
        required=False,
    )
    comparison: Comparison = nested("How what plans save is measured again and again.", Comparison, default={})
    serving: ServingClass | None = nested(
        "What the ServingPools of Deployments and StatefulSets with GPUs are like; absent: servers are left out.",
        ServingClass,
        required=False,
    )
    priority: int = integer(
        "Among the members of a PowerBudget, as far as it grants priority to the namespace.",
        minimum=-1_000_000,
        maximum=1_000_000,
        default=0,
    )
    ttl_seconds_after_finished: int | None = integer(
        "Delete a PerseusJob so long after all its pods have succeeded; absent: it goes with its workload.",
        minimum=0,
        maximum=10 * 365 * 24 * 3600,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    """Everything in status but conditions and observedGeneration."""

    jobs: int = integer("PerseusJobs that were made of it and exist now.", minimum=0, maximum=1_000_000)
    pools: int = integer("ServingPools that were made of it and exist now.", minimum=0, maximum=1_000_000)


class ClassCondition(StrEnum):
    """Type of a condition of an EnergyClass."""

    ACCEPTED = "Accepted"


class ClassReason(StrEnum):
    """Why. Stable: alerts and scripts match on these."""

    ACCEPTED = "Accepted"
    SPEC_INVALID = "SpecInvalid"
    NOT_APPLIED = "EnergyClassNotApplied"
    """Of an event on a pod: its class does not exist, is invalid, or is not for its namespace."""


def refusal(name: str, spec: ClassSpec | InvalidSpec | None, namespace: str, labels: Mapping[str, str]) -> str:
    """Why a class is not applied to who asks for it in a namespace: what follows "the pod" or "the namespace".

    Args:
        name: of the class.
        spec: its spec; None: there is no class of this name; InvalidSpec: its spec breaks a rule.
        namespace: of who asks for it.
        labels: of that namespace; they matter only to a class with a ``namespaceSelector``.

    Returns:
        Empty: the class is applied.
    """
    asks = f"asks for EnergyClass {name}, which"
    if spec is None:
        return f"{asks} does not exist"
    if isinstance(spec, InvalidSpec):
        return f"{asks} is invalid: {spec}"
    if spec.namespace_selector is not None and not spec.namespace_selector.selects(labels):
        return f"{asks} is not for namespace {namespace}: see its namespaceSelector"
    return ""


def job_of_class(spec: ClassSpec, workload: tuple[WorkloadKind | ServerKind, str] | None, profile: str) -> Json:
    """The spec of a PerseusJob of a class. Its shape is left to its training processes.

    Args:
        spec: of the class.
        workload: kind and name of what makes the pods; None: no kind that is known here.
        profile: name of the PerseusProfile; empty: it has one of its own.
    """
    job_spec: Json = {name: dump(getattr(spec, name)) for name in ("objective", "mode", "straggler", "priority")}
    if spec.objective.type is not ObjectiveType.FIXED_CLOCK:
        reference = {"profileRef": {"name": profile}} if profile else {}
        job_spec["profile"] = {**reference, "online": dump(spec.profiling)}
        job_spec["comparison"] = dump(spec.comparison)
    if workload is not None:
        job_spec["workload"] = {"reference": {"kind": workload[0].value, "name": workload[1]}}
    if spec.ttl_seconds_after_finished is not None:
        job_spec["ttlSecondsAfterFinished"] = spec.ttl_seconds_after_finished
    return job_spec


def pool_of_class(spec: ServingClass, server: Server, priority: int) -> Json:
    """The spec of a ServingPool of a class.

    Args:
        spec: of the class, for serving.
        server: whose replicas they are.
        priority: of the class.
    """
    return {"workload": dump(server), **dump(spec), "priority": priority}

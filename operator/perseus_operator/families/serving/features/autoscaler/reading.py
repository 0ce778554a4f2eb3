"""HorizontalPodAutoscalers as the API server shows them (``autoscaling/v2``): what each wants of its workload.

Anybody who may edit one writes them, so a field that is missing or is no number leaves out its metric, and never fails.
What cannot be read counts as nothing, as it does for the autoscaler itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.api.workload import ServerKind, WorkloadKind
from perseus_operator.nodes.workloads import preset_of, server_of, workload_of
from perseus_operator.objects.values import Pod

Target = tuple[str, str, str]
"""API group, kind and name of a workload."""

TOLERANCE: Final = 0.1
"""By what share a ratio may differ from 1 without anything being done: the default of kube-controller-manager."""
_MOST_METRICS: Final = 32
_LONGEST_NAME: Final = 128
_MOST_REPLICAS: Final = 1_000_000
_QUANTITY: Final = re.compile(
    r"(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE]([+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII
)
_SUFFIXES: Final = {
    **{suffix: 1e3**power for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)},
    **{f"{suffix}i": 1024.0**power for power, suffix in enumerate("KMGTPE", 1)},
}
_SOURCES: Final = {
    "Resource": "resource",
    "ContainerResource": "containerResource",
    "Pods": "pods",
    "Object": "object",
    "External": "external",
}
"""The field that describes a metric of each type."""
_VALUES: Final = {"Utilization": "averageUtilization", "AverageValue": "averageValue", "Value": "value"}
"""The field of a target of each type, and of what is measured of it."""
_STEADY: Final = re.compile(
    r"(perseus[-_](pool[-_])?advised[-_]replicas|per[-_]?second|(^|[-_])[rq]ps)$", re.IGNORECASE
)
"""Metrics that no clock changes: how many replicas we advise, as KEDA and Prometheus name it, and rates of arrivals."""


@dataclass(frozen=True)
class Metric:
    """One metric of an autoscaler.

    Attributes:
        name: of the metric.
        current: its value, in the unit of the target.
        target: that the autoscaler keeps it at.
    """

    name: str
    current: float
    target: float

    @property
    def pressure(self) -> float:
        """The value relative to the target: above 1 the autoscaler wants more replicas."""
        return self.current / self.target


@dataclass(frozen=True)
class Autoscaler:
    """One HorizontalPodAutoscaler.

    Attributes:
        name: its own.
        replicas: that it sees.
        desired: replicas, of which it has asked last.
        least: replicas that it keeps.
        most: replicas that it makes.
        up_tolerance: by what share the pressure may be above 1 without anything being done.
        down_tolerance: the same, below 1.
        metrics: whose values may change with clocks, at least one.
        steady: whether it reads metrics that no clock changes, too.
    """

    name: str
    replicas: int
    desired: int
    least: int
    most: int
    metrics: tuple[Metric, ...]
    up_tolerance: float = TOLERANCE
    down_tolerance: float = TOLERANCE
    steady: bool = False

    @property
    def nearest(self) -> Metric:
        """The metric that decides."""
        return max(self.metrics, key=lambda metric: metric.pressure)

    @property
    def wants_more(self) -> bool:
        """Whether it has asked for more replicas than there are, though not because we advise it."""
        return self.desired > self.replicas and not self.steady

    def wanted(self, pressure: float) -> int:
        """How many replicas it asks for at a pressure, by the formula of Kubernetes."""
        replicas = self.replicas
        if not -self.down_tolerance <= pressure - 1.0 <= self.up_tolerance:
            replicas = math.ceil(min(_MOST_REPLICAS, self.replicas * pressure) - 1e-9)
        return min(self.most, max(self.least, replicas))


def autoscalers_of(bodies: Iterable[Any], targets: Collection[Target]) -> tuple[Autoscaler, ...]:
    """Return the autoscalers of a workload that act and measure something, by name.

    Args:
        bodies: HorizontalPodAutoscalers of its namespace.
        targets: the workload, and what makes its pods.
    """
    read = (_autoscaler(body) for body in bodies if target_of(body) in targets)
    return tuple(sorted((one for one in read if one is not None), key=lambda one: one.name))


def targets_of(spec: PoolSpec | None, pods: Iterable[Pod]) -> set[Target]:
    """The workload that a pool names, those of its pods, and what makes its pods: each may be scaled."""
    reference = spec.pods.reference if spec is not None and spec.pods is not None else None
    targets: set[Target] = set() if reference is None else {_target(reference.kind, reference.name)}
    for pod in pods:
        if pod.owner is not None:
            targets.add((_group(pod.owner.api_version), pod.owner.kind, pod.owner.name))
        workload = server_of(pod.labels, pod.owner) or workload_of(pod.labels, pod.owner)
        if workload is not None:
            targets.add(_target(workload.kind, workload.name))
    return targets


def target_of(body: Any) -> Target | None:
    """What an autoscaler scales; None: it does not say."""
    reference = _at(body, "spec", "scaleTargetRef")
    version, kind, name = (reference.get(field) for field in ("apiVersion", "kind", "name"))
    if not isinstance(version, str) or not isinstance(kind, str) or not isinstance(name, str):
        return None
    return _group(version), kind, name


def name_of(body: Any) -> str:
    """Its own, as far as it is kept."""
    return str(_at(body, "metadata").get("name"))[:_LONGEST_NAME]


def _target(kind: WorkloadKind | ServerKind, name: str) -> Target:
    return _group(preset_of(kind).group), kind.value, name


def _group(api_version: str) -> str:
    return api_version.partition("/")[0]


def quantity(written: Any) -> float | None:
    """The value of a Kubernetes quantity, which is not negative; None: it is none.

    >>> quantity("1500m"), quantity("2Ki"), quantity("1e3"), quantity("many")
    (1.5, 2048.0, 1000.0, None)
    """
    read = _QUANTITY.fullmatch(str(written)) if isinstance(written, str | int) else None
    if read is None:
        return None
    number, exponent, suffix = read.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _SUFFIXES[suffix or ""])


def _autoscaler(body: Any) -> Autoscaler | None:
    """None: it is off, or has measured nothing that counts."""
    spec, status = _at(body, "spec"), _at(body, "status")
    conditions = [_at(one) for one in _list(status, "conditions")]
    if any(one.get("type") == "ScalingActive" and one.get("status") == "False" for one in conditions):
        return None
    pairs = list(islice(zip(_list(spec, "metrics"), _list(status, "currentMetrics"), strict=False), _MOST_METRICS))
    metrics = tuple(metric for pair in pairs if (metric := _metric(*pair)) is not None)
    most, replicas = _count(spec, "maxReplicas"), _count(status, "currentReplicas")
    counted = tuple(metric for metric in metrics if not _STEADY.search(metric.name))
    if most is None or not replicas or not counted:
        return None
    behavior = _at(spec, "behavior")
    up, down = (quantity(_at(behavior, way).get("tolerance")) for way in ("scaleUp", "scaleDown"))
    least, desired = _count(spec, "minReplicas"), _count(status, "desiredReplicas")
    return Autoscaler(
        name=name_of(body),
        replicas=replicas,
        desired=replicas if desired is None else desired,
        least=1 if least is None else least,
        most=most,
        metrics=counted,
        up_tolerance=TOLERANCE if up is None else up,
        down_tolerance=TOLERANCE if down is None else down,
        steady=len(counted) < len(metrics),
    )


def _metric(wanted: Any, measured: Any) -> Metric | None:
    """A metric, of the spec and of the status at the same place; None: it was not measured, or they do not match."""
    kind = _at(wanted).get("type")
    source = _SOURCES.get(kind) if isinstance(kind, str) else None
    if source is None or _at(measured).get("type") != kind:
        return None
    ours, theirs = _at(wanted, source), _at(measured, source)
    name, target = _name(ours), _at(ours, "target")
    value = _VALUES.get(str(target.get("type")))
    if value is None or name != _name(theirs):
        return None
    current, aim = quantity(_at(theirs, "current").get(value)), quantity(target.get(value))
    return None if current is None or not aim else Metric(name[:_LONGEST_NAME], current, aim)


def _name(source: Mapping[str, Any]) -> str:
    return str(_at(source, "metric").get("name") or source.get("name") or "")


def _at(body: Any, *path: str) -> Mapping[str, Any]:
    """The object at a path; empty where there is none."""
    for field in path:
        body = body.get(field) if isinstance(body, Mapping) else None
    return body if isinstance(body, Mapping) else {}


def _list(body: Mapping[str, Any], field: str) -> list[Any]:
    items = body.get(field)
    return items if isinstance(items, list) else []


def _count(body: Mapping[str, Any], field: str) -> int | None:
    number = body.get(field)
    valid = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= _MOST_REPLICAS
    return number if valid else None

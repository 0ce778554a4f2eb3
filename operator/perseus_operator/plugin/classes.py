"""What a namespace that asks for an EnergyClass must know: why no PerseusJob is made in it, or of which pods one is.

Until a class is applied there is no PerseusJob whose conditions could say it, so the plugin reads both objects itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping
from typing import Final, Protocol

from perseus_core import keys
from perseus_operator.api.energy_class import ClassSpec, refusal
from perseus_operator.api.schema import parse_spec
from perseus_operator.classes.refusals import pod_refusal
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.errors import InvalidSpec, KubeForbidden, KubeNotFound
from perseus_operator.objects.formatting import counted
from perseus_operator.objects.values import Json

_CHART: Final = "the chart makes `default` unless webhook.enabled or energyClass.enabled is false"
_MAKE_IT: Final = f"kubectl get energyclasses lists those that exist; {_CHART}"
_MEND_IT: Final = "kubectl describe energyclass says more; an administrator may change it"
_NEW_PODS: Final = (
    "create the pods anew if they are older than the label. The chart's webhook (webhook.enabled) sees pods as they are"
    " created: those of a training workload that ask for a GPU"
)
_SERVERS: Final = ", and those of Deployments and StatefulSets, as it has spec.serving"


class ClassReader(Protocol):
    """Reads namespaces and EnergyClasses from the API server."""

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Raises KubeNotFound."""
        ...

    def namespaces(self, label: str) -> Mapping[str, Mapping[str, str]]:
        """Labels, by name, of the namespaces that carry a label."""
        ...

    def energy_class(self, name: str) -> Json:
        """Raises KubeNotFound."""
        ...

    def pods(self, namespace: str | None, label: str) -> list[Json]:
        """Pods that carry a label, of a namespace or, with None, of the cluster."""
        ...


def class_of_namespace(reader: ClassReader, namespace: str) -> Json | None:
    """Say what becomes of the class that a namespace asks for.

    Args:
        reader: of the API server.
        namespace: whose label counts.

    Returns:
        ``namespace``, ``class``, ``applied``, ``says``, one clause, and ``do``; None: it asks for none, or its labels
        may not be read.
    """
    try:
        labels = reader.namespace_labels(namespace)
    except (KubeForbidden, KubeNotFound):
        return None
    return _answer(reader, namespace, labels)


def refused_namespaces(reader: ClassReader) -> Iterator[Json]:
    """All namespaces whose class is not applied, as ``class_of_namespace``; none: they may not be listed."""
    try:
        namespaces = reader.namespaces(keys.LABEL_CLASS)
    except (KubeForbidden, KubeNotFound):
        return
    for namespace, labels in sorted(namespaces.items()):
        answer = _answer(reader, namespace, labels)
        if answer is not None and not answer["applied"]:
            yield answer


def refused_pods(reader: ClassReader, namespace: str | None, jobs: Container[tuple[str, str]]) -> Iterator[Json]:
    """Say which pods ask for a class that is not applied to them, by a label of their own or of their namespace.

    Args:
        reader: of the API server; what the user may not read is not said.
        namespace: of the pods; None: all of the cluster.
        jobs: namespace and name of PerseusJobs and ServingPools that exist: their pods need no class.

    Yields:
        Each reason once in a namespace, with the first of its pods; fields as of ``class_of_namespace``.
    """
    try:
        pods = [pod for pod in map(pod_of, reader.pods(namespace, keys.LABEL_CLASS)) if pod]
    except (KubeForbidden, KubeNotFound):
        return
    reasons: dict[tuple[str, str, str], list[str]] = {}
    labels_of = functools.cache(reader.namespace_labels)
    for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name)):
        if (pod.namespace, pod.job) in jobs or pod.failure or pod.succeeded:
            continue
        with contextlib.suppress(KubeForbidden, KubeNotFound):
            if why := pod_refusal(pod, _class(reader, pod.energy_class), labels_of(pod.namespace)):
                reasons.setdefault((pod.namespace, pod.energy_class, why), []).append(pod.name)
    for (where, name, why), names in reasons.items():
        others = f" and {counted(len(names) - 1, 'other pod')} of its namespace" if len(names) > 1 else ""
        first = names[0] if namespace else f"{where}/{names[0]}"
        says = f"pod {first}{others} at default clocks: {why}"
        do = _MAKE_IT if why.endswith("does not exist") else _MEND_IT
        yield {"namespace": where, "class": name, "applied": False, "says": says, "do": do}


def _answer(reader: ClassReader, namespace: str, labels: Mapping[str, str]) -> Json | None:
    name = labels.get(keys.LABEL_CLASS, "")
    if name in ("", keys.NO_CLASS):
        return None
    applied, do = False, _MEND_IT
    try:
        spec = _class(reader, name)
    except KubeForbidden:
        says, do = f"asks for EnergyClass {name}, which you may not read", "ask an administrator whether it exists"
        applied = True  # for all that is known
    else:
        says = refusal(name, spec, namespace, labels)
        do = _MAKE_IT if spec is None else do
        if not says:
            serves = isinstance(spec, ClassSpec) and spec.serving is not None
            applied, do = True, _NEW_PODS + (_SERVERS if serves else "")
            says = f"asks for EnergyClass {name}: a PerseusJob is made when pods of a training workload run"
            says += ", a ServingPool when those of a server do" if serves else ""
    says = f"namespace {namespace} {says}"
    return {"namespace": namespace, "class": name, "applied": applied, "says": says, "do": do}


def _class(reader: ClassReader, name: str) -> ClassSpec | InvalidSpec | None:
    try:
        return parse_spec(ClassSpec, reader.energy_class(name).get("spec"))
    except InvalidSpec as error:
        return error
    except KubeNotFound:
        return None

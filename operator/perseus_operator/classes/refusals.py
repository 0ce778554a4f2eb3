"""Why the EnergyClass that a pod asks for is not applied: in one place for events and for ``kubectl perseus``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from perseus_core import keys
from perseus_operator.api.energy_class import ClassSpec, refusal
from perseus_operator.api.schema import DNS_NAME
from perseus_operator.classes.pool_owners import server_of_class
from perseus_operator.errors import InvalidSpec
from perseus_operator.objects.values import Pod


def pod_refusal(pod: Pod, spec: ClassSpec | InvalidSpec | None, labels: Mapping[str, str]) -> str:
    """Say why nothing is made of a pod's class, as a clause.

    Args:
        pod: that asks for a class.
        spec: of that class; see ``refusal``.
        labels: of the pod's namespace; they matter only to a class with a ``namespaceSelector``.

    Returns:
        Empty: the class is applied.
    """
    if why := refusal(pod.energy_class, spec, pod.namespace, labels):
        return f"it {why}"
    assert isinstance(spec, ClassSpec)
    if server_of_class(pod) is not None:
        return "" if spec.serving is not None else f"EnergyClass {pod.energy_class} has no spec.serving"
    if pod.profile and not re.fullmatch(DNS_NAME, pod.profile):
        return f"its annotation {keys.ANNOTATION_PROFILE} must be the name of a PerseusProfile"
    return ""

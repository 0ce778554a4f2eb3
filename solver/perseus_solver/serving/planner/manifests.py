"""Manifests for who routes: of each class of requests a pool of endpoints, and one route between them.

Which class a request is of, the gateway has to know: it sends the header ``x-request-class``, by the length of the
prompt and what it expects of the answer. Requests without one go to the class with the most of them. Endpoints are the
pods of the ServingPool of the class's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from perseus_core import keys
from perseus_solver.errors import InvalidProblem

HEADER: Final = "x-request-class"
_NAME: Final = r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?"
"""A name in DNS, with room for the picker's ending."""
_PICKER_PORT: Final = 9_002
_ENGINE_PORT: Final = 8_000
_MOST_CLASSES: Final = 15


def manifests(loads: Mapping[str, float], gateway: str) -> dict[str, Any]:
    """Return a List of an InferencePool for each class, and of an HTTPRoute.

    Args:
        loads: requests of each class, by its name.
        gateway: the Gateway that routes.

    Returns:
        As ``kubectl apply`` takes it. Each pool asks the endpoint picker that is the Service ``NAME-epp``.

    Raises:
        InvalidProblem: there is no class, or a name is none of an object.

    >>> pool, route = manifests({"chat": 3.0}, "inference")["items"]
    >>> pool["kind"], route["spec"]["rules"][0]["backendRefs"][0]["name"]
    ('InferencePool', 'chat')
    """
    if not 0 < len(loads) <= _MOST_CLASSES:
        raise InvalidProblem(f"loads must have 1 to {_MOST_CLASSES} classes, not {len(loads)}: a route has 16 rules")
    for name in (*loads, gateway):
        if not re.fullmatch(_NAME, name):
            raise InvalidProblem(f"{name[:64]!r} must be a name of an object: at most 53 of a-z, 0-9 and -")
    most = max(loads, key=lambda name: (loads[name], name))
    rules = [
        {"matches": [{"headers": [{"name": HEADER, "value": name}]}], "backendRefs": [_backend(name)]} for name in loads
    ]
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": f"{gateway}-classes"},
        "spec": {"parentRefs": [{"name": gateway}], "rules": [*rules, {"backendRefs": [_backend(most)]}]},
    }
    return {"apiVersion": "v1", "kind": "List", "items": [*map(_pool, loads), route]}


def _backend(name: str) -> dict[str, str]:
    return {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}


def _pool(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {keys.LABEL_JOB: name}},
            "targetPorts": [{"number": _ENGINE_PORT}],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": _PICKER_PORT}},
        },
    }

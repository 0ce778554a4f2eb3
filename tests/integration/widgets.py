"""What the tests of the API server share: a custom resource with a rule of each kind, and how answers are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

GROUP, VERSION, PLURAL = "tests.perseus.energy", "v1", "widgets"
CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": PLURAL, "kind": "Widget", "shortNames": ["wg"]},
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
                    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["size"],
                                "properties": {
                                    "size": {"type": "integer", "minimum": 1, "maximum": 64},
                                    "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                                    "slowdown": {"type": "string", "pattern": "^[0-9]+%$"},
                                    "tags": {"type": "array", "maxItems": 2, "items": {"type": "string"}},
                                    "limit": {"x-kubernetes-int-or-string": True},
                                    "power": {
                                        "type": "object",
                                        "properties": {"capW": {"type": "integer", "default": 400}},
                                    },
                                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                                },
                            },
                            "status": {
                                "type": "object",
                                "properties": {
                                    "observedGeneration": {"type": "integer"},
                                    "conditions": {
                                        "type": "array",
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["type"],
                                        "items": {
                                            "type": "object",
                                            "required": ["type", "status"],
                                            "properties": {"type": {"type": "string"}, "status": {"type": "string"}},
                                        },
                                    },
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}


def absent(read: Callable[[], object]) -> bool:
    try:
        read()
    except ApiException as error:
        if error.status == 404:
            return True
        raise
    return False


def refused(call: Callable[[], object]) -> tuple[int, dict[str, Any]]:
    """Code and Status body of the error that a call must raise."""
    with pytest.raises(ApiException) as caught:
        call()
    return caught.value.status, json.loads(caught.value.body)


class Widgets:
    """The custom resource in one namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.custom = client.CustomObjectsApi(api)
        self.namespace = namespace
        self.place = (GROUP, VERSION, namespace, PLURAL)

    def create(self, name: str = "one", *, metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Widget",
            "metadata": {"name": name, **(metadata or {})},
            "spec": spec or {"size": 4},
        }
        return self.custom.create_namespaced_custom_object(*self.place, body)

    def get(self, name: str = "one") -> dict[str, Any]:
        return self.custom.get_namespaced_custom_object(*self.place, name)

    def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.custom.replace_namespaced_custom_object(*self.place, body["metadata"]["name"], body)

    def replace_status(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.custom.replace_namespaced_custom_object_status(*self.place, body["metadata"]["name"], body)

    def patch(self, patch: Any, name: str = "one") -> dict[str, Any]:
        kind = "application/json-patch+json" if isinstance(patch, list) else "application/merge-patch+json"
        return self.custom.patch_namespaced_custom_object(*self.place, name, patch, _content_type=kind)

    def delete(self, name: str = "one", **options: Any) -> dict[str, Any]:
        return self.custom.delete_namespaced_custom_object(*self.place, name, **options)


def pod(name: str, *, node: str = "", labels: dict[str, str] | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "none"}]}
    if node:
        spec["nodeName"] = node
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec}

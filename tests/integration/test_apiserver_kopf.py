"""kopf against the API server: handlers see an object's whole life; progress and finalizers stay on the object."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kopf
import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.waiting import eventually

CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "sprockets.tests.perseus.energy"},
    "spec": {
        "group": "tests.perseus.energy",
        "scope": "Namespaced",
        "names": {"plural": "sprockets", "kind": "Sprocket"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "properties": {"teeth": {"type": "integer", "minimum": 3}}},
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}
PLACE = ("tests.perseus.energy", "v1")


@pytest.fixture
def seen(kubeconfig: Path, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the handlers of a running operator have seen."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    extensions = client.ApiextensionsV1Api(api)
    extensions.create_custom_resource_definition(CRD)
    eventually(lambda: served(api, namespace))
    calls: list[str] = []
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(kopf.login_with_kubeconfig)
    attempts = 0

    @kopf.on.create("sprockets", registry=registry)
    async def created(name: str, patch: kopf.Patch, **_: Any) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise kopf.TemporaryError("not yet", delay=0.1)
        calls.append(f"created {name} at attempt {attempts}")
        patch.status["ready"] = True

    @kopf.on.update("sprockets", field="spec.teeth", registry=registry)
    async def updated(old: Any, new: Any, **_: Any) -> None:
        calls.append(f"updated {old} to {new}")

    @kopf.on.delete("sprockets", registry=registry)
    async def deleted(name: str, **_: Any) -> None:
        calls.append(f"deleted {name}")

    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    stop, ready = threading.Event(), threading.Event()
    operator = kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        namespaces=[namespace],
        stop_flag=stop,
        ready_flag=ready,
    )
    # A loop of its own: on its way out, kopf waits for every task of the loop that it runs in.
    thread = threading.Thread(target=asyncio.run, args=(operator,))
    thread.start()
    assert ready.wait(60)
    yield calls
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    extensions.delete_custom_resource_definition(CRD["metadata"]["name"])


def served(api: Any, namespace: str) -> bool:
    try:
        client.CustomObjectsApi(api).list_namespaced_custom_object(*PLACE, namespace, "sprockets")
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    return True


def test_the_lifecycle_of_an_object_under_kopf(api: Any, namespace: str, seen: list[str]) -> None:
    sprockets = client.CustomObjectsApi(api)
    place = (*PLACE, namespace, "sprockets")
    body = {
        "apiVersion": "/".join(PLACE),
        "kind": "Sprocket",
        "metadata": {"name": "s"},
        "spec": {"teeth": 8},
    }
    sprockets.create_namespaced_custom_object(*place, body)
    eventually(lambda: "created s at attempt 2" in seen)

    def read() -> dict[str, Any]:
        found: dict[str, Any] = sprockets.get_namespaced_custom_object(*place, "s")
        return found

    eventually(lambda: read().get("status", {}).get("ready") is True)
    assert read()["metadata"]["finalizers"]
    assert read()["metadata"]["generation"] == 1

    patch = {"spec": {"teeth": 9}}
    sprockets.patch_namespaced_custom_object(*place, "s", patch, _content_type="application/merge-patch+json")
    eventually(lambda: "updated 8 to 9" in seen)

    sprockets.delete_namespaced_custom_object(*place, "s")
    eventually(lambda: "deleted s" in seen)
    eventually(lambda: not sprockets.list_namespaced_custom_object(*place)["items"])
    assert seen == ["created s at attempt 2", "updated 8 to 9", "deleted s"]

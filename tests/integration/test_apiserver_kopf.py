"""kopf against the API server: handlers see an object's whole life; progress and finalizers stay on the object."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import kopf
import pytest
from kubernetes import client

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
async def seen(kubeconfig: Path, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """What the handlers of a running operator have seen."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    extensions = client.ApiextensionsV1Api(api)
    await asyncio.to_thread(extensions.create_custom_resource_definition, CRD)
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
    stop = asyncio.Event()
    ready = asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=settings,
            standalone=True,
            namespaces=[namespace],
            stop_flag=stop,
            ready_flag=ready,
        )
    )
    await asyncio.wait_for(ready.wait(), 10)
    yield calls
    stop.set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(running, 10)
    await asyncio.to_thread(extensions.delete_custom_resource_definition, CRD["metadata"]["name"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.05)


async def test_the_life_of_an_object_under_kopf(api: Any, namespace: str, seen: list[str]) -> None:
    sprockets = client.CustomObjectsApi(api)
    place = (*PLACE, namespace, "sprockets")
    body = {
        "apiVersion": "/".join(PLACE),
        "kind": "Sprocket",
        "metadata": {"name": "s"},
        "spec": {"teeth": 8},
    }
    await asyncio.to_thread(sprockets.create_namespaced_custom_object, *place, body)
    await until(lambda: "created s at attempt 2" in seen)

    def read() -> dict[str, Any]:
        found: dict[str, Any] = sprockets.get_namespaced_custom_object(*place, "s")
        return found

    await until(lambda: read().get("status", {}).get("ready") is True)
    assert read()["metadata"]["finalizers"]
    assert read()["metadata"]["generation"] == 1

    await asyncio.to_thread(
        lambda: sprockets.patch_namespaced_custom_object(
            *place, "s", {"spec": {"teeth": 9}}, _content_type="application/merge-patch+json"
        )
    )
    await until(lambda: "updated 8 to 9" in seen)

    await asyncio.to_thread(sprockets.delete_namespaced_custom_object, *place, "s")
    await until(lambda: "deleted s" in seen)
    await until(lambda: not sprockets.list_namespaced_custom_object(*place)["items"])
    assert seen == ["created s at attempt 2", "updated 8 to 9", "deleted s"]

"""kopf against the API server: handlers see an object's whole life; progress and finalizers stay on the object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.integration import sprockets
from tests.waiting import eventually

from perseus_sim.processes import Processes

CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{sprockets.PLURAL}.{sprockets.GROUP}"},
    "spec": {
        "group": sprockets.GROUP,
        "scope": "Namespaced",
        "names": {"plural": sprockets.PLURAL, "kind": "Sprocket"},
        "versions": [
            {
                "name": sprockets.VERSION,
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


@pytest.fixture
def seen(kubeconfig: Path, api: Any, namespace: str, tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """What the handlers of a running operator have seen."""
    extensions = client.ApiextensionsV1Api(api)
    extensions.create_custom_resource_definition(CRD)
    eventually(lambda: served(api, namespace))
    handlers = Path(__file__).with_name("sprockets.py")
    command = [sys.executable, "-m", "kopf", "run", "--standalone", f"--namespace={namespace}", str(handlers)]
    lines = tmp_path / "seen"
    lines.touch()
    # A process of its own: kopf leaves TLS connections open that wait for the server's good-bye when its loop ends.
    with Processes(tmp_path) as processes:
        operator = processes.start(
            "kopf", command, environment={"KUBECONFIG": str(kubeconfig), sprockets.SEEN: str(lines)}
        )
        yield lambda: lines.read_text(encoding="utf-8").splitlines()
        assert operator.running, operator.tail()
        assert operator.stop() == 0, operator.tail()
    extensions.delete_custom_resource_definition(CRD["metadata"]["name"])


def served(api: Any, namespace: str) -> bool:
    try:
        client.CustomObjectsApi(api).list_namespaced_custom_object(
            sprockets.GROUP, sprockets.VERSION, namespace, sprockets.PLURAL
        )
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    return True


def test_the_lifecycle_of_an_object_under_kopf(api: Any, namespace: str, seen: Callable[[], list[str]]) -> None:
    custom = client.CustomObjectsApi(api)
    place = (sprockets.GROUP, sprockets.VERSION, namespace, sprockets.PLURAL)
    body = {
        "apiVersion": f"{sprockets.GROUP}/{sprockets.VERSION}",
        "kind": "Sprocket",
        "metadata": {"name": "s"},
        "spec": {"teeth": 8},
    }
    custom.create_namespaced_custom_object(*place, body)
    eventually(lambda: "created s at attempt 2" in seen())

    def read() -> dict[str, Any]:
        found: dict[str, Any] = custom.get_namespaced_custom_object(*place, "s")
        return found

    eventually(lambda: read().get("status", {}).get("ready") is True)
    assert read()["metadata"]["finalizers"]
    assert read()["metadata"]["generation"] == 1

    patch = {"spec": {"teeth": 9}}
    custom.patch_namespaced_custom_object(*place, "s", patch, _content_type="application/merge-patch+json")
    eventually(lambda: "updated 8 to 9" in seen())

    custom.delete_namespaced_custom_object(*place, "s")
    eventually(lambda: "deleted s" in seen())
    eventually(lambda: not custom.list_namespaced_custom_object(*place)["items"])
    assert seen() == ["created s at attempt 2", "updated 8 to 9", "deleted s"]

"""API servers for end-to-end tests: each test runs on the embedded one and on a real one, or says why it did not.

The real one is the cluster that KUBECONFIG_E2E names, or a control plane of our own (``make control-plane``).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import new_client_from_config

from perseus_sim.controlplane import NoControlPlane
from perseus_sim.servers import Server, embedded_server, real_server

CRD = Path(__file__).resolve().parents[2] / "deploy" / "crds" / "perseusjobs.yaml"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*features): skip, aloud, where the API server lacks one of them")


@pytest.fixture(scope="session", params=["embedded", "real"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The API server under this test."""
    start = {"embedded": embedded_server, "real": real_server}[request.param]
    try:
        with start(tmp_path_factory.mktemp(request.param)) as running:
            yield running
    except NoControlPlane as missing:
        pytest.skip(f"not run on a real API server: {missing}")


@pytest.fixture(autouse=True)
def _skip_what_the_server_lacks(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("needs")
    if marker is None:
        return
    server: Server = request.getfixturevalue("server")
    for feature in marker.args:
        if feature not in server.features:
            pytest.skip(f"the {server.name} has no {feature.value}")


@pytest.fixture(scope="session")
def api(server: Server) -> Iterator[Any]:
    """The administrator's connection."""
    with new_client_from_config(str(server.kubeconfig)) as connection:
        yield connection


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """A namespace of the test's own."""
    core = client.CoreV1Api(api)
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)


@pytest.fixture(scope="session")
def crd(api: Any) -> Iterator[Any]:
    """The PerseusJob CRD, installed from the committed file; a cluster that had it keeps it."""
    definitions = client.ApiextensionsV1Api(api)
    body = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    name = body["metadata"]["name"]
    found = definitions.list_custom_resource_definition(field_selector=f"metadata.name={name}").items
    if found:
        body["metadata"]["resourceVersion"] = found[0].metadata.resource_version
        definitions.replace_custom_resource_definition(name, body)
    else:
        definitions.create_custom_resource_definition(body)
    deadline = time.monotonic() + 20

    def conditions() -> dict[str, str]:
        return {c.type: c.status for c in definitions.read_custom_resource_definition(name).status.conditions or ()}

    while conditions().get("Established") != "True":
        assert time.monotonic() < deadline, f"the CRD is not established: {conditions()}"
        time.sleep(0.05)
    yield definitions.read_custom_resource_definition(name)
    if not found:
        definitions.delete_custom_resource_definition(name)

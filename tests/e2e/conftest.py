"""API servers for end-to-end tests: the real one where there is one, else the embedded one.

The real one is the cluster that KUBECONFIG_E2E names, or a control plane that the tests start (``make control-plane``).
Tests with the mark ``on_both`` run on both: enough of them that the embedded server remains one on which an operator
and its users can work.

The fixture ``world`` is one PerseusJob and an operator process. On a server with RBAC the operator runs under its own
service account with only the chart's rules.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import new_client_from_config
from kubernetes.utils import create_from_dict
from tests.e2e.world import World, absent
from tests.namespaces import own_namespace
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Feature, Server, embedded_server, real_server
from perseus_sim.cluster.control_plane import NoControlPlane, find_assets
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.processes import Processes

SYSTEM = "perseus-system"
CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
EMBEDDED, REAL = "embedded", "real"
START = {EMBEDDED: embedded_server, REAL: real_server}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*features): skip with a message where the API server lacks one of them")
    config.addinivalue_line("markers", "on_both: run on the embedded API server too where there is a real one")


@functools.cache
def no_real_server() -> str:
    """Why there is no real API server; empty if there is one."""
    if "KUBECONFIG_E2E" in os.environ:
        return ""
    try:
        find_assets()
    except NoControlPlane as missing:
        return str(missing)
    return ""


def pytest_report_header() -> str:
    missing = no_real_server()
    return f"API server: embedded; NOT RUN on a real one: {missing}" if missing else "API server: a real one"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    servers = [EMBEDDED] if no_real_server() else [REAL]
    if metafunc.definition.get_closest_marker("on_both"):
        servers = sorted({EMBEDDED, *servers})
    for fixture, scope in (("server", "session"), ("cluster", "function")):
        if fixture in metafunc.fixturenames and fixture not in chosen:
            metafunc.parametrize(fixture, servers, indirect=True, scope=scope)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The API server of the test."""
    with START[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


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
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCluster]:
    """A simulated cluster on the API server, never on a given one, where tests must not make nodes."""
    monkeypatch.delenv("KUBECONFIG_E2E", raising=False)
    try:
        with SimulatedCluster(server=START[request.param]) as running:
            yield running
    except NoControlPlane as missing:
        pytest.skip(f"not run on a control plane of this machine: {missing}")


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """A separate namespace for the test."""
    with own_namespace(api) as name:
        yield name


@pytest.fixture(scope="session")
def crd(api: Any) -> Iterator[Any]:
    """The PerseusJob CRD and those of what is stored for one, installed from the committed files. A cluster that
    already had them keeps them. The first is returned."""
    definitions = client.ApiextensionsV1Api(api)
    with contextlib.ExitStack() as installed:
        for plural in (keys.FRONTIER_PLURAL, keys.PROFILE_PLURAL, keys.CLASS_PLURAL, keys.POOL_PLURAL):
            installed.enter_context(_installed(definitions, plural))
        yield installed.enter_context(_installed(definitions, keys.PLURAL))


@pytest.fixture(scope="session")
def budget_crd(api: Any) -> Iterator[Any]:
    """The PowerBudget CRD, likewise."""
    with _installed(client.ApiextensionsV1Api(api), keys.BUDGET_PLURAL) as definition:
        yield definition


@contextlib.contextmanager
def _installed(definitions: Any, plural: str) -> Iterator[Any]:
    body = yaml.safe_load((CRDS / f"{plural}.yaml").read_text(encoding="utf-8"))
    name = body["metadata"]["name"]
    found = definitions.list_custom_resource_definition(field_selector=f"metadata.name={name}").items
    if found:
        body["metadata"]["resourceVersion"] = found[0].metadata.resource_version
        definitions.replace_custom_resource_definition(name, body)
    else:
        definitions.create_custom_resource_definition(body)

    def conditions() -> dict[str, str]:
        return {c.type: c.status for c in definitions.read_custom_resource_definition(name).status.conditions or ()}

    eventually(lambda: conditions().get("Established") == "True", "the CRD is not established")
    yield definitions.read_custom_resource_definition(name)
    if not found:
        definitions.delete_custom_resource_definition(name)


@pytest.fixture(scope="session")
def operator_kubeconfig(server: Server, api: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's kubeconfig: of its service account where the server has RBAC, else the administrator's."""
    core = client.CoreV1Api(api)
    if absent(lambda: core.read_namespace(SYSTEM)):
        core.create_namespace({"metadata": {"name": SYSTEM}})
    if Feature.RBAC not in server.features:
        return server.kubeconfig
    for document in rbac.operator_manifest(SYSTEM):
        create_from_dict(api, document, namespace=SYSTEM, apply=True)
    return rbac.log_in(server.kubeconfig, SYSTEM, "perseus-operator", tmp_path_factory.mktemp("rbac") / "kubeconfig")


@pytest.fixture
def world(
    api: Any, crd: Any, budget_crd: Any, namespace: str, operator_kubeconfig: Path, tmp_path: Path
) -> Iterator[World]:
    with Processes(tmp_path) as processes:
        world = World(api, namespace, operator_kubeconfig, tmp_path, processes)
        world.start_operator()
        yield world
        if not world.gone():
            world.delete()

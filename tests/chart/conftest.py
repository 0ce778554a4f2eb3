"""The chart with a real Helm: fixtures that render it, and a real API server to install it on.

Without Helm every test of the chart is skipped with a message. Without the binaries of a control plane, the tests that
install the chart are skipped. Helm comes from ``make chart-test``, which builds it where Go is installed, or from PATH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import new_client_from_config
from tests.doubles.process_node import ProcessNode
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_sim.cluster.api_servers import Feature, Server, real_server
from perseus_sim.cluster.control_plane import NoControlPlane, find_assets
from perseus_sim.gpus.nvml_shim import ShimError, build

CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"
NAMESPACE = "perseus-system"
PROGRAMS = {
    "perseus-operator": [sys.executable, "-m", "perseus_operator"],
    "perseus-agent": [sys.executable, "-m", "perseus_agent"],
    "perseus-bench": [sys.executable, "-m", "perseus_bench"],
    "perseus-trainer": [sys.executable, "-m", "perseus_sim.training.pod_job"],
}
CRD = "perseusjobs.perseus.energy"
CRDS = tuple(f"{plural}.{keys.API_GROUP}" for plural in keys.PLURALS)
Objects = dict[tuple[str, str], dict[str, Any]]
"""Objects by kind and name; in another namespace than the release's the name is ``namespace/name``."""


class HelmFailed(RuntimeError):
    """A helm command failed; the message is its output."""


class Helm:
    """The helm command, without the user's own configuration."""

    def __init__(self, binary: str, home: Path) -> None:
        self._binary = binary
        homes = {f"HELM_{kind}_HOME": str(home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        self.environment = {**os.environ, **homes, "PATH": f"{Path(binary).parent}:{os.environ['PATH']}"}

    def __call__(self, *arguments: str, stdin: str = "", kubeconfig: Path | None = None) -> str:
        login = {"KUBECONFIG": str(kubeconfig) if kubeconfig else os.devnull}
        done = subprocess.run(
            [self._binary, *arguments],
            input=stdin,
            env=self.environment | login,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        if done.returncode != 0:
            raise HelmFailed(done.stderr + done.stdout)
        return done.stdout


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    try:
        built = find_assets() / "helm"
        problem = f"no helm in {built.parent} nor on the PATH: run `make chart-test`"
    except NoControlPlane as missing:
        built, problem = Path("/nonexistent"), f"no helm on the PATH, and {missing}"
    binary = str(built) if os.access(built, os.X_OK) else shutil.which("helm")
    if binary is None:
        pytest.skip(f"the chart is not tested: {problem}")
    return Helm(binary, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., Objects]:
    """``render(values, *flags)`` renders the chart with values from a mapping, from flags, or from both."""

    def rendered(values: dict[str, Any] | None = None, *flags: str, chart: Path = CHART) -> Objects:
        arguments = ["template", "perseus", str(chart), "--namespace", NAMESPACE, "--values", "-", *flags]
        documents = yaml.safe_load_all(helm(*arguments, stdin=yaml.safe_dump(values or {})))
        objects: Objects = {}
        for document in filter(None, documents):
            namespace = document["metadata"].get("namespace", NAMESPACE)
            name = document["metadata"]["name"]
            key = document["kind"], name if namespace == NAMESPACE else f"{namespace}/{name}"
            assert key not in objects, f"rendered twice: {key}"
            objects[key] = document
        return objects

    return rendered


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real API server, one for each file: what one installs, or leaves behind, is nothing to the others."""
    try:
        with real_server(tmp_path_factory.mktemp("server")) as running:
            yield running
    except NoControlPlane as missing:
        pytest.skip(f"the chart is not installed: {missing}")


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Any]:
    """The administrator's connection."""
    connect: Any = new_client_from_config
    with connect(str(server.kubeconfig)) as connection:
        yield connection


def until(what: str, check: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a check returns true; fail after ``timeout_s``."""
    eventually(check, f"not yet: {what}", every_s=0.2, patience_s=timeout_s)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="pn") as folder:
        yield Path(folder)


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """The namespace of the install page; it is deleted afterwards with everything in it."""
    core = client.CoreV1Api(api)
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    core.create_namespace({"metadata": {"name": NAMESPACE, "labels": labels}})
    until("the service account is there", lambda: core.list_namespaced_service_account(NAMESPACE).items)
    yield NAMESPACE
    core.delete_namespace(NAMESPACE)

    def gone() -> bool:
        return NAMESPACE not in {item.metadata.name for item in core.list_namespace().items}

    until("the namespace is gone", gone)


@pytest.fixture
def node(api: Any, server: Server, short: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessNode]:
    if server.plane is None or Feature.CONTROLLERS not in server.features:
        pytest.skip(f"the {server.name} cannot get a node of the test, or has no controllers")
    try:
        library = build(tmp_path_factory.mktemp("library"))
    except ShimError as error:
        pytest.skip(f"no simulated GPUs: {error}")
    programs = PROGRAMS | {"perseus-gpu-sim": [sys.executable, "-m", "perseus_sim.gpus.offer", f"--library={library}"]}
    proc_root = "PERSEUS_AGENT_PROC_ROOT"
    with ProcessNode(api, server.kubeconfig, short, programs, proc_root_variable=proc_root) as node:
        yield node


@pytest.fixture
def on_server(helm: Helm, server: Server) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        return helm(*arguments, "--namespace", NAMESPACE, kubeconfig=server.kubeconfig)

    return run


def secrets(api: Any) -> dict[str, dict[str, str]]:
    found = client.CoreV1Api(api).list_namespaced_secret(NAMESPACE, label_selector="app.kubernetes.io/instance=perseus")
    return {secret.metadata.name: secret.data for secret in found.items}


def delete_definitions(api: Any) -> None:
    """Delete the CRDs, which Helm keeps, and wait until they are gone, so that the next test does not find them."""
    definitions = client.ApiextensionsV1Api(api)
    for name in CRDS:
        definitions.delete_custom_resource_definition(name)

    def left() -> dict[str, list[str]]:
        found = {item.metadata.name: item for item in definitions.list_custom_resource_definition().items}
        return {
            name: [f"{c.type}={c.status}: {c.message}" for c in found[name].status.conditions]
            for name in CRDS
            if name in found
        }

    def none_left() -> bool:
        if kept := left():
            # A server that could not list the objects, because their store was just being opened, tries again ever
            # later, up to 16 minutes; a definition that has changed is looked at at once.
            for name in (name for name, conditions in kept.items() if "could not list instances" in str(conditions)):
                touched = {"metadata": {"annotations": {"test/touched": str(time.monotonic())}}}
                with contextlib.suppress(client.ApiException):  # it has gone since
                    definitions.patch_custom_resource_definition(name, touched)
            raise AssertionError(kept)
        return True

    # The server gives the objects of a definition a minute to go, and then tries again.
    eventually(none_left, "the definitions are not gone", every_s=2, patience_s=180, not_yet=(AssertionError,))

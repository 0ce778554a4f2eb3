"""What integration tests share: an API server, an agent's socket, the NVML shim.

Tests here start processes of ours and have the mark ``processes`` (`make integration`), except the modules of
``WITHIN_THIS_PROCESS``, which `make test` runs too. The API server is the embedded one, or the one that
PERSEUS_TEST_KUBECONFIG names.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from tests.integration.client_agent import SCHEDULE, Agent
from tests.integration.widgets import CRD, Widgets, absent
from tests.namespaces import own_namespace
from tests.waiting import eventually

import perseus_client
from perseus_agent.devices import nvml
from perseus_client import marks
from perseus_client.session import Session
from perseus_proto.hello import Hello
from perseus_sim.gpus.nvml_shim import ENV_STATE, Shim, ShimError, build
from perseus_sim.processes import Processes

HERE = Path(__file__).parent
WITHIN_THIS_PROCESS = {
    "test_client_session.py",
    "test_device_plugin.py",
    "test_dynamic_resources.py",
    "test_nvml_energy.py",
    "test_nvml_shim.py",
    "test_nvml_shim_changes.py",
    "test_operator_rpc.py",
    "test_peers.py",
    "test_socket_resource.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.name not in WITHIN_THIS_PROCESS:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(autouse=True)
def _within_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without the mark may not start a process of ours."""
    if request.node.get_closest_marker("processes") is None:

        def refuse(*_arguments: object, **_options: object) -> None:
            pytest.fail("a module of WITHIN_THIS_PROCESS starts a process")

        monkeypatch.setattr(Processes, "start", refuse)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: a path of a Unix socket has 107 bytes at most, and pytest's own folders are deep."""
    folder = Path(tempfile.mkdtemp(prefix="perseus-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig of a server that this session may write to."""
    given = os.environ.get("PERSEUS_TEST_KUBECONFIG")
    if given:
        yield Path(given)
        return
    folder = tmp_path_factory.mktemp("apiserver")
    path = folder / "kubeconfig"
    with Processes(folder) as processes:
        server = processes.start(
            "apiserver", [sys.executable, "-m", "perseus_sim.apiserver", "--kubeconfig", str(path)]
        )
        server.wait_until(path.exists)
        yield path
        assert server.running, server.tail()


@pytest.fixture(scope="session")
def api(kubeconfig: Path) -> Iterator[Any]:
    """The Python client's connection to that server."""
    with config.new_client_from_config(str(kubeconfig)) as connection:
        yield connection


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """A namespace of the test's own."""
    with own_namespace(api) as name:
        yield name


@pytest.fixture(scope="module")
def definition(api: Any) -> Iterator[dict[str, Any]]:
    """The custom resource of ``tests.integration.widgets``, for as long as a module uses it."""
    extensions = client.ApiextensionsV1Api(api)
    extensions.create_custom_resource_definition(CRD)

    def established() -> bool:
        found = extensions.read_custom_resource_definition(CRD["metadata"]["name"])
        return any(c.type == "Established" and c.status == "True" for c in found.status.conditions or ())

    eventually(established)
    yield CRD
    extensions.delete_custom_resource_definition(CRD["metadata"]["name"])
    eventually(lambda: absent(lambda: extensions.read_custom_resource_definition(CRD["metadata"]["name"])))


@pytest.fixture
def widgets(api: Any, definition: dict[str, Any], namespace: str) -> Widgets:
    """Custom resources in the test's own namespace."""
    return Widgets(api, namespace)


@pytest.fixture
def core(api: Any, namespace: str) -> Any:
    """The core API, once the test's namespace is ready for pods."""
    core = client.CoreV1Api(api)
    eventually(lambda: not absent(lambda: core.read_namespaced_service_account("default", namespace)))
    return core


@pytest.fixture
def agent_socket(tmp_path: Path) -> Path:
    """Where the client looks for its agent."""
    return tmp_path / "agent.sock"


@pytest.fixture
def agents(agent_socket: Path) -> Iterator[Callable[..., Agent]]:
    """Start agents that are gone after the test."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket, Hello], None] | None = None) -> Agent:
            agent = Agent(agent_socket, answer)
            stack.callback(agent.die)
            return agent

        yield start


@pytest.fixture(params=["compiled", "python"])
def connect(
    agent_socket: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Session]]:
    """Connect sessions that are closed after the test; with either kind of marks."""
    if request.param == "python":
        monkeypatch.setattr(marks, "_marks", None)
    elif marks._marks is None:
        pytest.skip("marks were not compiled when this was installed")
    with contextlib.ExitStack() as stack:

        def connect(**arguments: object) -> Session:
            given = {"dp": 1, "stage": 2, "schedule": SCHEDULE, "socket_path": str(agent_socket)} | arguments
            session = perseus_client.connect(**given)  # type: ignore[arg-type]
            stack.callback(session.close)
            return session

        yield connect


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The NVML shim, built. This process has loaded it, so that pynvml's own loading of its soname finds it."""
    try:
        library = build(tmp_path_factory.mktemp("nvml"))
    except ShimError as error:
        if "no C compiler" in str(error):
            pytest.skip(str(error))
        raise
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return library


@pytest.fixture
def shim(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shim]:
    """Two idle GPUs whose driver this test talks to."""
    shim = Shim(nvml_library, tmp_path / "nvml-state", create_gpus=2)
    monkeypatch.setenv(ENV_STATE, str(shim.state))
    yield shim
    shim.close()


@pytest.fixture
def devices(shim: Shim) -> Iterator[nvml.NvmlDevices]:
    """Both GPUs under full load and without samples of power, opened with the energy check skipped for time."""
    for gpu in range(2):
        shim.set(gpu, busy_permille=1000, energy_period_us=1_000, has_samples=0)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0.01)
    yield opened
    shim.clear()
    opened.close()

"""The world of the operator's tests: the operator as a process, between an API server and agents that answer by script.

The API server is the embedded one, as a process; the agents are real gRPC servers in this process, with training that
takes one iteration when the test says so. A test asks for ``world`` (a namespace of its own under an operator that all
share) or ``own_world`` (operators of its own, to start and kill), drives one chapter of a job's life and reads what
users read: status, events, ConfigMaps, metrics; and what the agents were told.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import kubernetes
import pytest
import yaml
from tests.integration.operator_loop.world import Operator, World

from perseus_sim.cluster.api_servers import embedded_server
from perseus_sim.processes import Processes

REPOSITORY = Path(__file__).resolve().parents[3]
TAKEN, OWN = itertools.count(), itertools.count()
SHARED_NAMESPACES = [f"shared-{n}" for n in range(32)]


@pytest.fixture(scope="package")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One API server for all tests; each has a namespace of its own in it."""
    with embedded_server(tmp_path_factory.mktemp("api")) as server:
        api = kubernetes.config.new_client_from_config(str(server.kubeconfig))
        for plural in ("perseusjobs", "perseusprofiles", "perseusfrontiers"):  # without PowerBudget
            crd = yaml.safe_load((REPOSITORY / f"deploy/crds/{plural}.yaml").read_text())
            kubernetes.client.ApiextensionsV1Api(api).create_custom_resource_definition(crd)
        for name in (
            "shared-system",
            *SHARED_NAMESPACES,
            *(f"own-{n}{end}" for n in range(12) for end in ("", "-system")),
        ):
            kubernetes.client.CoreV1Api(api).create_namespace({"metadata": {"name": name}})
        api.close()
        yield server.kubeconfig


@pytest.fixture(scope="package")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("operators")) as processes:
        yield processes


@pytest.fixture(scope="package")
def shared(processes: Processes, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Operator:
    """One operator for the tests that leave it as it is."""
    return Operator(processes, tmp_path_factory.mktemp("ready"), kubeconfig, SHARED_NAMESPACES, "shared-system")


@contextlib.asynccontextmanager
async def connected(world: World) -> AsyncIterator[World]:
    await world.connect()
    try:
        yield world
    finally:
        for agent in world.agents:
            await agent.die()
        await world.api.close()  # type: ignore[no-untyped-call]


@pytest.fixture
async def world(kubeconfig: Path, shared: Operator) -> AsyncIterator[World]:
    """A world that the shared operator serves."""
    world = World(SHARED_NAMESPACES[next(TAKEN)], "shared-system", kubeconfig)
    world.operators.append(shared)
    async with connected(world):
        yield world


@pytest.fixture
async def own_world(tmp_path: Path, processes: Processes, kubeconfig: Path) -> AsyncIterator[World]:
    """A world whose operators the test starts and ends."""
    name = f"own-{next(OWN)}"
    world = World(name, f"{name}-system", kubeconfig)
    world.start = lambda: world.operators.append(Operator(processes, tmp_path, kubeconfig, [name], f"{name}-system"))
    async with connected(world):
        world.start()
        yield world
        for operator in world.operators:
            operator.child.popen.kill()

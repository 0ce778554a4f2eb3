"""Any valid edits in any order: once they are over, every GPU runs at its plan's clocks or at its default.

The operator is a process, the API server the embedded one, agents are light. On a real API server, with faults, in
tests/e2e/test_chaos.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config
from tests import chaos

from perseus_sim.cluster.api_servers import embedded_server

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
SEED = int(os.environ.get("PERSEUS_SEED", "7"))
MOVES = 14


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Path]:
    """Of a server with the CRDs."""
    with embedded_server(tmp_path / "api") as server:
        with config.new_client_from_config(str(server.kubeconfig)) as api:
            for path in CRDS.iterdir():
                definition = yaml.safe_load(path.read_text(encoding="utf-8"))
                client.ApiextensionsV1Api(api).create_custom_resource_definition(definition)
        yield server.kubeconfig


@pytest.mark.timeout(1200)
async def test_any_valid_edits_in_any_order(login: Path, tmp_path: Path) -> None:
    async with chaos.world(admin=login, operator=login, folder=tmp_path, namespace="edits", seed=SEED) as world:
        await world.cluster.start_operator(*chaos.FLAGS)
        await world.add("ada", "bell")
        await world.settle("at the start")
        for _ in range(MOVES):
            await world.move()
            if world.dice.random() < 0.4:  # the others come while the one before is still at work
                await world.settle("between edits")
        await world.settle("at the end")
        for subject in world.subjects:
            if subject.exists:
                await world.delete(subject)
        await world.settle("all deleted")
        assert "unexpected error" not in world.cluster.operators[0].log

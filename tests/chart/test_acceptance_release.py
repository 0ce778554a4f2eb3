"""Agents that leave a node on request, and ``helm test`` that accepts a GPU there, on a real API server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.chart.conftest import NAMESPACE, delete_definitions, until
from tests.doubles.process_node import ProcessNode

from perseus_agent.clocks.journal import JournalLock
from perseus_agent.devices.nvml import may_write
from perseus_core import keys

pytestmark = [
    pytest.mark.skipif(not may_write(), reason="the agent rightly refuses to set clocks without CAP_SYS_ADMIN"),
]
CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"


def test_a_label_sends_the_agent_away_and_helm_test_accepts_a_gpu(
    on_server: Callable[..., str], api: Any, node: ProcessNode, namespace: str
) -> None:
    core, apps = client.CoreV1Api(api), client.AppsV1Api(api)

    def agents() -> int:
        return apps.read_namespaced_daemon_set("perseus-agent", NAMESPACE).status.number_ready or 0

    def agent_pods() -> list[str]:
        selector = f"{keys.LABEL_COMPONENT}={keys.COMPONENT_AGENT}"
        return [pod.metadata.name for pod in core.list_namespaced_pod(NAMESPACE, label_selector=selector).items]

    values = "simulatedGpus.enabled=true,simulatedGpus.count=2,acceptance.enabled=true"
    on_server("install", "perseus", str(CHART), "--set", values, "--set-json", "acceptance.minutes=0.1")
    until("the agent is ready", lambda: agents() == 1)
    lock = JournalLock(node.host("/var/lib/perseus/agent-journal.json"))
    assert not lock.take()  # the agent holds it

    core.patch_node(node.name, {"metadata": {"labels": {keys.LABEL_RELEASE_GPUS: "true"}}})
    until("the agent has left", lambda: not agent_pods())
    assert lock.take()  # nobody holds it any more
    lock.release()
    output = on_server("test", "perseus", "--timeout", "120s", "--filter", "name=perseus-accept")
    assert re.search(r"Phase:\s+Succeeded", output), output + node.log_of("perseus-accept")
    log = node.log_of("perseus-accept")
    assert "# Acceptance report" in log
    assert "Clocks are back at their defaults." in log

    core.patch_node(node.name, {"metadata": {"labels": {keys.LABEL_RELEASE_GPUS: None}}})
    until("the agent is back", lambda: agents() == 1)
    assert not lock.take()
    on_server("uninstall", "perseus")
    delete_definitions(api)

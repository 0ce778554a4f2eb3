"""A queue of solves on a real cluster: the chart's autoscaler starts workers, by the rule that the documentation gives
for the adapter, and they take part of the work."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import external_metrics
import monitoring
import pytest
import yaml
from installation import CHART, PATIENCE_S, SYSTEM
from journey import AGENTS, Journey
from solves import Solves

from perseus_sim.cluster.pki import Authority

pytestmark = pytest.mark.timeout(900)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "solver-service.md"
PORT = 9443
MOST = 3
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true"),
    *("--set", "solver.enabled=true,solver.resources.requests.cpu=100m"),
    *("--set", f"solver.autoscaling.enabled=true,solver.autoscaling.maxReplicas={MOST}"),
)


@pytest.fixture
def journey(cleared_journey: Journey) -> Journey:
    cleared_journey.install(*INSTALL)
    return cleared_journey


@contextlib.contextmanager
def adapter(journey: Journey, folder: Path) -> Iterator[None]:
    """An external metric by the documented rule, from a Prometheus that scrapes the release."""
    rendered = yaml.safe_load_all(
        journey.helm(
            "template",
            "perseus",
            str(CHART),
            "--namespace",
            SYSTEM,
            *INSTALL,
            "--set",
            "metrics.podMonitor.enabled=true",
        )
    )
    [monitor] = [body for body in rendered if body and body["kind"] == "PodMonitor"]
    [rule] = yaml.safe_load(re.findall(r"```yaml\n(externalRules:.*?)```", PAGE.read_text(), re.DOTALL)[0])[
        "externalRules"
    ]
    pair = Authority("adapter").issue("adapter", hosts=("adapter",))
    certificate, key = folder / "adapter.crt", folder / "adapter.key"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    hub, family = journey.cluster.network.hub, "IPv6" if journey.cluster.ipv6 else "IPv4"
    version = external_metrics.GROUP.partition("/")[2]
    metadata = {"name": "adapter", "namespace": SYSTEM}
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": PORT}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "adapter"}},
            "endpoints": [{"addresses": [hub], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": PORT, "protocol": "TCP"}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": ".".join(reversed(external_metrics.GROUP.split("/")))},
            "spec": {
                "group": external_metrics.GROUP.partition("/")[0], "version": version,
                "service": {"name": "adapter", "namespace": SYSTEM, "port": 443},
                "insecureSkipTLSVerify": True, "groupPriorityMinimum": 100, "versionPriority": 100,
            },
        },
    ]  # fmt: skip
    with monitoring.serve(journey.cluster, monitor, folder):
        command = [
            *journey.cluster.control_plane.enter(network_only=True),
            *(sys.executable, external_metrics.__file__, hub, str(PORT), str(certificate), str(key)),
            *(rule["name"]["as"], rule["metricsQuery"], "http://127.0.0.1:9090"),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            journey.kubectl("apply", "-f", "-", stdin=objects)
            try:
                yield
            finally:
                journey.kubectl("delete", "apiservice", objects[-1]["metadata"]["name"], "--ignore-not-found")
                process.terminate()


def test_a_queue_starts_workers_which_take_part_of_it(journey: Journey, tmp_path: Path) -> None:
    solves = Solves(journey, jobs=12, microbatches=64)

    def all_started() -> bool:
        solves.look()
        return len(journey.pods("solver")) == MOST

    with adapter(journey, tmp_path):
        solves.ask()
        journey.eventually("the autoscaler starts workers", all_started, PATIENCE_S)
        scaler = journey.read("-n", SYSTEM, "get", "hpa", "perseus-solver")
        conditions = {condition["type"]: condition["status"] for condition in scaler["status"]["conditions"]}
        assert conditions["ScalingActive"] == "True"
        journey.eventually("every frontier is solved", solves.ended, PATIENCE_S)
    journey.say(f"{solves.jobs} frontiers were solved by {len(solves.done)} workers: {sorted(solves.done.values())}")
    assert sum(solves.done.values()) == solves.jobs
    assert sum(count > 0 for count in solves.done.values()) > 1

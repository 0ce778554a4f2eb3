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
from journey import AGENTS, TRAINING, Journey

from perseus_proto import keys
from perseus_sim.cluster.pki import Authority
from perseus_sim.profiles import profile_csv

pytestmark = pytest.mark.timeout(900)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "solver-service.md"
PORT = 9443
STAGES, MICROBATCHES, JOBS, MOST = 16, 64, 12, 3
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


def queue(journey: Journey) -> None:
    """Apply jobs that are all solved, each from a profile of its own."""
    documents: list[dict[str, Any]] = []
    for number in range(JOBS):
        name = f"wide-{number}"
        csv = profile_csv(STAGES, imbalance=1.25, forward_s=0.05 + 0.001 * number)
        metadata = {"name": name, "namespace": TRAINING}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"profile.csv": csv}})
        spec = {
            "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES},
            "profile": {"configMapRef": {"name": name}, "blockingPowerMilliwatts": 83_640},
            "mode": "Recommend",
        }
        version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        documents.append({"apiVersion": version, "kind": keys.KIND, "metadata": metadata, "spec": spec})
    journey.kubectl("apply", "-f", "-", stdin=documents)


def test_a_queue_starts_workers_which_take_part_of_it(journey: Journey, tmp_path: Path) -> None:
    done: dict[str, float] = {}

    def work() -> dict[str, float]:
        """How much each worker has done, also those that have gone."""
        for pod in journey.pods("solver"):
            name = pod.metadata.name
            path = f"/api/v1/namespaces/{SYSTEM}/pods/{name}:{keys.DEFAULT_SOLVER_METRICS_PORT}/proxy/metrics"
            with contextlib.suppress(Exception):
                page = journey.kubectl("get", "--raw", path)
                found = re.findall(r'perseus_solver_work_total\{outcome="answered",task="solve"\} (\S+)', page)
                done[name] = max(done.get(name, 0.0), sum(map(float, found)))
        return done

    def solved() -> bool:
        work()
        jobs = journey.read("-n", TRAINING, "get", keys.PLURAL)["items"]
        ready = [
            condition
            for job in jobs
            for condition in job.get("status", {}).get("conditions", ())
            if (condition["type"], condition["status"]) == ("FrontierReady", "True")
        ]
        return len(ready) == JOBS

    with adapter(journey, tmp_path):
        queue(journey)
        journey.eventually(
            "the autoscaler starts workers",
            lambda: (work(), len(journey.pods("solver")) == MOST)[1],
            PATIENCE_S,
        )
        scaler = journey.read("-n", SYSTEM, "get", "hpa", "perseus-solver")
        conditions = {condition["type"]: condition["status"] for condition in scaler["status"]["conditions"]}
        assert conditions["ScalingActive"] == "True"
        journey.eventually("every frontier is solved", solved, PATIENCE_S)
    journey.say(f"{JOBS} frontiers were solved by {len(done)} workers: {sorted(done.values())}")
    assert sum(done.values()) == JOBS
    assert sum(count > 0 for count in done.values()) > 1

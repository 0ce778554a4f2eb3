"""An external metric for autoscalers of a real cluster, by a documented rule: from a Prometheus that scrapes the
release, by ``external_metrics`` in the place of Prometheus Adapter.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import external_metrics
import monitoring
import yaml
from installation import CHART, SYSTEM
from journey import Journey

from perseus_sim.cluster.pki import Authority

DOCS = Path(__file__).resolve().parents[2] / "docs"
PORT = 9443


@contextlib.contextmanager
def adapter(journey: Journey, page: str, flags: Sequence[str], folder: Path) -> Iterator[None]:
    """Serve the metric of the only rule of a page of the documentation. ``flags``: of the release."""
    rendered = yaml.safe_load_all(
        journey.helm(
            *("template", "perseus", str(CHART), "--namespace", SYSTEM, *flags),
            *("--set", "metrics.podMonitor.enabled=true"),
        )
    )
    [monitor] = [body for body in rendered if body and body["kind"] == "PodMonitor"]
    [block] = re.findall(r"```yaml\n(externalRules:.*?)```", (DOCS / page).read_text(), re.DOTALL)
    [rule] = yaml.safe_load(block)["externalRules"]
    series = rule["seriesQuery"].partition("{")[0]
    metric = rule.get("name", {}).get("as", series)
    [namespace] = rule["resources"]["overrides"]
    query = rule["metricsQuery"].replace("<<.Series>>", series)
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
            *(metric, query, "http://127.0.0.1:9090", namespace),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            journey.kubectl("apply", "-f", "-", stdin=objects)
            try:
                yield
            finally:
                journey.kubectl("delete", "apiservice", objects[-1]["metadata"]["name"], "--ignore-not-found")
                process.terminate()

"""A Prometheus on a real cluster, told what to scrape by the chart's PodMonitor alone.

Used by ``test_journey``. The server runs beside the control plane, from where pods can be reached, and finds them by
Kubernetes service discovery. What the Prometheus Operator would make of the PodMonitor is made of it here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from local_cluster.cluster import Cluster

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules.yaml"
INTERVAL_S = 2
_ADDRESS = "127.0.0.1:9090"
_ASK = """
import json, sys, urllib.request
print(json.dumps([json.load(urllib.request.urlopen(url, timeout=60))["data"] for url in json.load(sys.stdin)]))
"""


class Prometheus:
    """A server in the control plane's network."""

    def __init__(self, cluster: Cluster) -> None:
        self._enter = cluster.control_plane.enter(network_only=True)

    def get(self, *asked: tuple[str, dict[str, str]]) -> list[Any]:
        """The answers to several paths with parameters, by one process in that network.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        urls = [f"http://{_ADDRESS}{path}?{urllib.parse.urlencode(parameters)}" for path, parameters in asked]
        command = [*self._enter, sys.executable, "-c", _ASK]
        ran = subprocess.run(command, input=json.dumps(urls), capture_output=True, text=True, check=False)
        if ran.returncode:
            raise OSError(ran.stderr.strip().rpartition("\n")[2])
        return list(json.loads(ran.stdout))

    def ever(self, queries: dict[str, str], since_s: float, until_s: float) -> dict[str, bool]:
        """Whether each query had a value at any time between; NaN is none."""
        when = {"start": f"{since_s}", "end": f"{until_s}", "step": f"{INTERVAL_S}"}
        answers = self.get(*(("/api/v1/query_range", {"query": query, **when}) for query in queries.values()))
        found = [
            any(text != "NaN" for series in answer["result"] for _, text in series["values"]) for answer in answers
        ]
        return dict(zip(queries, found, strict=True))

    def scraped(self) -> dict[str, str]:
        """The health of everything that is scraped, by the name of its pod."""
        [found] = self.get(("/api/v1/targets", {"state": "active"}))
        return {target["labels"]["pod"]: target["health"] for target in found["activeTargets"]}

    def rules(self) -> dict[str, str]:
        """The health of every rule."""
        [found] = self.get(("/api/v1/rules", {}))
        return {rule["name"]: rule["health"] for group in found["groups"] for rule in group["rules"]}


@contextlib.contextmanager
def serve(cluster: Cluster, monitor: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """A server that scrapes what a PodMonitor selects, and applies the project's rules."""
    login = yaml.safe_load(cluster.kubeconfig.read_text())
    login["clusters"][0]["cluster"]["server"] = cluster.server
    (folder / "kubeconfig").write_text(yaml.safe_dump(login))
    settings = {
        "global": {"evaluation_interval": f"{INTERVAL_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [_scrape_config(monitor, folder / "kubeconfig")],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
    command = [str(cluster.assets / "prometheus"), *options, f"--web.listen-address={_ADDRESS}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*cluster.control_plane.enter(network_only=True), *command], stdout=log, stderr=log)
    try:
        yield Prometheus(cluster)
    finally:
        server.terminate()
        server.wait(60)


def _scrape_config(monitor: dict[str, Any], kubeconfig: Path) -> dict[str, Any]:
    """What the Prometheus Operator makes of a PodMonitor with one endpoint: pods by label, the port by name."""
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    wanted = {
        f"__meta_kubernetes_pod_label_{key.translate(str.maketrans('./-', '___'))}": value
        for key, value in monitor["spec"]["selector"]["matchLabels"].items()
    }
    wanted["__meta_kubernetes_pod_container_port_name"] = endpoint["port"]
    keep = [{"source_labels": [label], "regex": value, "action": "keep"} for label, value in wanted.items()]
    names = {"namespace": "namespace", "pod": "pod_name", "container": "pod_container_name"}
    label = [{"source_labels": [f"__meta_kubernetes_{of}"], "target_label": name} for name, of in names.items()]
    namespaces = monitor["spec"].get("namespaceSelector", {"matchNames": [monitor["metadata"]["namespace"]]})
    return {
        "job_name": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
        "metrics_path": endpoint["path"],
        "scrape_interval": f"{INTERVAL_S}s",
        "scrape_timeout": f"{INTERVAL_S}s",
        "honor_labels": endpoint["honorLabels"],
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": str(kubeconfig), "namespaces": {"names": namespaces["matchNames"]}}
        ],
        "relabel_configs": [*keep, *label],
    }

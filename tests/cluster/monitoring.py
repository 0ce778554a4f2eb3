"""A Prometheus on a real cluster that scrapes what the chart's PodMonitor selects, and what the install page says.

The server runs in the control plane's network, from which it reaches pods, and finds them by Kubernetes service
discovery. This module translates the PodMonitor to a configuration as the Prometheus Operator does.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from local_cluster.cluster import Cluster

_ROOT = Path(__file__).resolve().parents[2]
RULES = _ROOT / "deploy" / "prometheus" / "rules.yaml"
INTERVAL_S = 2
_ADDRESS = "127.0.0.1:9090"
_QUERY = """
import json, sys, urllib.request
print(json.dumps([json.load(urllib.request.urlopen(url, timeout=60))["data"] for url in json.load(sys.stdin)]))
"""


class Prometheus:
    """A server in the control plane's network."""

    def __init__(self, cluster: Cluster) -> None:
        self._enter = cluster.control_plane.enter(network_only=True)

    def get(self, *requests: tuple[str, dict[str, str]]) -> list[Any]:
        """Return the answers to several requests (path and parameters), sent by one process in that network.

        Raises:
            OSError: the server does not answer, or refuses a request.
        """
        urls = [f"http://{_ADDRESS}{path}?{urllib.parse.urlencode(parameters)}" for path, parameters in requests]
        command = [*self._enter, sys.executable, "-c", _QUERY]
        ran = subprocess.run(command, input=json.dumps(urls), capture_output=True, text=True, check=False)
        if ran.returncode:
            raise OSError(ran.stderr.strip().rpartition("\n")[2])
        return list(json.loads(ran.stdout))

    def ever(self, queries: dict[str, str], since_s: float, until_s: float) -> dict[str, bool]:
        """Return for each query whether it had a value, other than NaN, between two times."""
        span = {"start": f"{since_s}", "end": f"{until_s}", "step": f"{INTERVAL_S}"}
        answers = self.get(*(("/api/v1/query_range", {"query": query, **span}) for query in queries.values()))
        found = [
            any(text != "NaN" for series in answer["result"] for _, text in series["values"]) for answer in answers
        ]
        return dict(zip(queries, found, strict=True))

    def scraped(self) -> dict[tuple[str, str], str]:
        """Return the health of every target, by the name of its scrape job and of its pod."""
        [found] = self.get(("/api/v1/targets", {"state": "active"}))
        return {(target["scrapePool"], target["labels"]["pod"]): target["health"] for target in found["activeTargets"]}

    def rules(self) -> dict[str, str]:
        """Return the health of every rule, by its name."""
        [found] = self.get(("/api/v1/rules", {}))
        return {rule["name"]: rule["health"] for group in found["groups"] for rule in group["rules"]}


@contextlib.contextmanager
def serve(cluster: Cluster, monitor: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Run a server that scrapes the pods of a PodMonitor and evaluates the project's rules."""
    login = yaml.safe_load(cluster.kubeconfig.read_text())
    login["clusters"][0]["cluster"]["server"] = cluster.server
    (folder / "kubeconfig").write_text(yaml.safe_dump(login))
    settings = {
        "global": {"evaluation_interval": f"{INTERVAL_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            _scrape_config(monitor, folder / "kubeconfig"),
            _of_the_page(monitor, folder / "kubeconfig"),
        ],
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


def _of_the_page(monitor: dict[str, Any], kubeconfig: Path) -> dict[str, Any]:
    """Return the scrape job of the install page, for the monitor's namespaces. Its samples would count twice: they are
    dropped.
    """
    page = (_ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```yaml\n(- job_name: .*?)^```$", page, re.MULTILINE | re.DOTALL)
    [job] = yaml.safe_load(block)
    for discovery in job["kubernetes_sd_configs"]:
        discovery["kubeconfig_file"] = str(kubeconfig)
        discovery["namespaces"]["names"] = _namespaces(monitor)
    drop = {"source_labels": ["__name__"], "regex": ".+", "action": "drop"}
    return {**job, "scrape_interval": f"{INTERVAL_S}s", "metric_relabel_configs": [drop]}


def _scrape_config(monitor: dict[str, Any], kubeconfig: Path) -> dict[str, Any]:
    """Return the Prometheus Operator's configuration for a PodMonitor with one endpoint."""
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    wanted = {
        f"__meta_kubernetes_pod_label_{key.translate(str.maketrans('./-', '___'))}": value
        for key, value in monitor["spec"]["selector"]["matchLabels"].items()
    }
    wanted["__meta_kubernetes_pod_container_port_name"] = endpoint["port"]
    keep = [{"source_labels": [label], "regex": value, "action": "keep"} for label, value in wanted.items()]
    names = {"namespace": "namespace", "pod": "pod_name", "container": "pod_container_name"}
    label = [{"source_labels": [f"__meta_kubernetes_{of}"], "target_label": name} for name, of in names.items()]
    return {
        "job_name": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
        "metrics_path": endpoint["path"],
        "scrape_interval": f"{INTERVAL_S}s",
        "scrape_timeout": f"{INTERVAL_S}s",
        "honor_labels": endpoint["honorLabels"],
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": str(kubeconfig), "namespaces": {"names": _namespaces(monitor)}}
        ],
        "relabel_configs": [*keep, *label],
    }


def _namespaces(monitor: dict[str, Any]) -> list[str]:
    """Return the namespaces whose pods a PodMonitor selects."""
    own = {"matchNames": [monitor["metadata"]["namespace"]]}
    return list(monitor["spec"].get("namespaceSelector", own)["matchNames"])

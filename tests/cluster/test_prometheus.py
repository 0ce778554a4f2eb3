"""Prometheus on a real cluster: it finds operator and agents by the chart's PodMonitor, and the dashboards have data.

Debian's server runs beside the control plane, from where pods can be reached. What the Prometheus Operator would make
of the chart's PodMonitor is made of it here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from stage import CHART, PATIENCE_S, SYSTEM, Stage
from tests.observability.test_queries import page_queries, panel_queries

pytestmark = pytest.mark.timeout(900)

ADDRESS = "127.0.0.1:9090"
RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules.yaml"
_ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


@pytest.fixture(scope="module")
def stage(cluster: Any, api: Any, helm: Any, images: set[str], eventually: Any) -> Iterator[Stage]:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus on this machine (Debian: apt-get install prometheus)")
    stage = Stage(cluster, api, helm, eventually)
    try:
        stage.set()
        yield stage
    finally:
        stage.strike()


class Prometheus:
    """A server in the control plane's network."""

    def __init__(self, stage: Stage) -> None:
        self._enter = stage.cluster.control_plane.enter(network_only=True)

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{ADDRESS}{path}?{urllib.parse.urlencode(parameters)}"
        command = [*self._enter, sys.executable, "-c", _ASK, url]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise OSError(asked.stderr.strip().rpartition("\n")[2])
        return json.loads(asked.stdout)["data"]

    def values(self, expression: str) -> list[float]:
        """What a query answers now; NaN is no answer."""
        found = [float(series["value"][1]) for series in self.get("/api/v1/query", query=expression)["result"]]
        return [value for value in found if value == value]


def scrape_config(monitor: dict[str, Any], kubeconfig: Path) -> dict[str, Any]:
    """What the Prometheus Operator makes of a PodMonitor with one endpoint: pods by label, the port by name."""
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    keep = [
        {"source_labels": [f"__meta_kubernetes_pod_label_{key.translate(str.maketrans('./-', '___'))}"],
         "regex": value, "action": "keep"}
        for key, value in monitor["spec"]["selector"]["matchLabels"].items()
    ]  # fmt: skip
    keep.append(
        {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"], "action": "keep"}
    )
    names = {"namespace": "namespace", "pod": "pod_name", "container": "pod_container_name"}
    label = [{"source_labels": [f"__meta_kubernetes_{of}"], "target_label": name} for name, of in names.items()]
    return {
        "job_name": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
        "metrics_path": endpoint["path"],
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "honor_labels": endpoint["honorLabels"],
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": str(kubeconfig),
             "namespaces": {"names": [monitor["metadata"]["namespace"]]}}
        ],
        "relabel_configs": [*keep, *label],
    }  # fmt: skip


@pytest.fixture(scope="module")
def prometheus(stage: Stage, helm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    rendered = helm(
        "template", "perseus", str(CHART), "--namespace", SYSTEM, "--set", "metrics.podMonitor.enabled=true"
    )
    [monitor] = [body for body in yaml.safe_load_all(rendered) if body and body["kind"] == "PodMonitor"]
    # The administrator's file leads to a port of this machine; from the control plane's network the way is shorter.
    login = yaml.safe_load(stage.cluster.kubeconfig.read_text())
    [server] = stage.core.read_namespaced_endpoints("kubernetes", "default").subsets
    login["clusters"][0]["cluster"]["server"] = f"https://{server.addresses[0].ip}:{server.ports[0].port}"
    (folder / "kubeconfig").write_text(yaml.safe_dump(login))
    settings = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape_config(monitor, folder / "kubeconfig")],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    asked = Prometheus(stage)
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = ["prometheus", *options, f"--web.listen-address={ADDRESS}", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        enter = stage.cluster.control_plane.enter(network_only=True)
        server = subprocess.Popen([*enter, *command], stdout=log, stderr=log)
    try:
        expected = 1 + len(stage.cluster.nodes)
        up = lambda: asked.values("up") == [1.0] * expected  # noqa: E731
        stage.eventually("operator and agents are found and scraped", up, PATIENCE_S)
        yield asked
    finally:
        server.terminate()
        server.wait(60)
        print((folder / "log").read_text()[-2000:])


def test_operator_and_every_agent_are_found(prometheus: Prometheus, stage: Stage) -> None:
    targets = prometheus.get("/api/v1/targets")["activeTargets"]
    found = sorted((target["labels"]["container"], target["health"]) for target in targets)
    assert found == [*[("agent", "up")] * len(stage.cluster.nodes), ("operator", "up")]
    assert [name for name in prometheus.get("/api/v1/labels") if name.startswith("exported_")] == []


def test_panels_and_pages_have_data(prometheus: Prometheus, stage: Stage) -> None:
    """All but those that tell of what this job has not: a straggler, a profile being measured, a calibrated model."""
    job = stage.jobs[0].name
    queries = {
        where: query.replace("gpt3", job).replace('"default"', '"training"').replace("[5s]", "[30s]")
        for where, query in (*panel_queries(), *page_queries())
    }

    def empty() -> list[str]:
        return sorted(where for where, query in queries.items() if not prometheus.values(query))

    absent = ("straggler", "calibrat", "predicted", "profil", "budget", "slow")
    unexpected = lambda: [w for w in empty() if not any(a in (w + queries[w]).lower() for a in absent)]  # noqa: E731
    stage.eventually("every panel has data", lambda: not unexpected() or print(unexpected()), PATIENCE_S)
    assert len(empty()) < len(queries) / 4


def test_no_alert_of_trouble_fires_while_all_is_well(prometheus: Prometheus) -> None:
    alerts = prometheus.get("/api/v1/alerts")["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []

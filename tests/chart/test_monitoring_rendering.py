"""What the chart renders for those who watch: monitors, scrape jobs, rules, dashboards, traces."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.conftest import (
    CHART,
)
from tests.chart.manifests import (
    AGENT,
    OPERATOR,
    Render,
    environment,
    kinds,
    pod,
)

from perseus_agent.settings import parse_settings as agent_settings
from perseus_core import keys
from perseus_operator.controller.settings import parse_settings as operator_settings

RUNBOOKS = CHART.parents[1] / "docs" / "runbooks.md"


def test_traces_go_to_the_collector_that_is_named_and_are_off_without(render: Render) -> None:
    assert "otlp-endpoint" not in str(render()["Deployment", "perseus-operator"])
    closed = render()["NetworkPolicy", "perseus-operator"]["spec"]["egress"]
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}]
    otlp = {"endpoint": "http://collector.observability:4317", "to": peers, "headers": {"secret": "token"}}
    objects = render({"otlp": otlp})
    [operator] = objects["Deployment", "perseus-operator"]["spec"]["template"]["spec"]["containers"]
    assert operator_settings(operator["args"], {}).otlp_endpoint == "http://collector.observability:4317"
    [headers] = operator["env"]
    assert headers["name"] == "OTEL_EXPORTER_OTLP_HEADERS"
    assert headers["valueFrom"]["secretKeyRef"] == {"name": "token", "key": "headers"}
    opened = [rule for rule in objects["NetworkPolicy", "perseus-operator"]["spec"]["egress"] if rule not in closed]
    assert opened == [{"ports": [{"port": 4317, "protocol": "TCP"}], "to": peers}]


def test_monitors(render: Render) -> None:
    assert not {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Service", "ConfigMap"} & kinds(render())
    scrape = {"enabled": True, "labels": {"release": "prometheus"}, "honorLabels": True, "interval": "5s"}
    monitor = render({"metrics": {"podMonitor": scrape}})["PodMonitor", "perseus"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "5s", "honorLabels": True}
    objects = render({"metrics": {"serviceMonitor": scrape}})
    for component, port in (
        ("operator", keys.DEFAULT_OPERATOR_METRICS_PORT),
        ("agent", keys.DEFAULT_AGENT_METRICS_PORT),
    ):
        service = objects["Service", f"perseus-{component}-metrics"]
        assert service["spec"]["ports"][0]["port"] == port
        selector = objects["ServiceMonitor", f"perseus-{component}"]["spec"]["selector"]["matchLabels"]
        assert selector.items() <= service["metadata"]["labels"].items()
        key = OPERATOR if component == "operator" else AGENT
        assert service["spec"]["selector"].items() <= objects[key]["spec"]["template"]["metadata"]["labels"].items()


def kept(job: dict[str, Any], pod: dict[str, Any]) -> list[str]:
    """The names of a pod's ports that the relabelling of a scrape job keeps."""
    translated = str.maketrans("./-", "___")
    labels = {f"__meta_kubernetes_pod_label_{k.translate(translated)}": v for k, v in pod["metadata"]["labels"].items()}
    found = []
    for port in [port["name"] for container in pod["spec"]["containers"] for port in container["ports"]]:
        known = labels | {"__meta_kubernetes_pod_container_port_name": port}
        rules = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
        if all(re.fullmatch(rule["regex"], ";".join(known[name] for name in rule["source_labels"])) for rule in rules):
            found.append(port)
    return found


@pytest.mark.parametrize("page", ["install.md", "operations.md"], ids=["prometheus", "opentelemetry"])
def test_the_scrape_job_of_the_documentation_finds_metrics(render: Render, page: str) -> None:
    text = (CHART.parents[1] / "docs" / page).read_text()
    [block] = re.findall(r"^```yaml\n((?:- job_name|receivers):.*?)^```$", text, re.MULTILINE | re.DOTALL)
    read = yaml.safe_load(block)
    [job] = read if isinstance(read, list) else read["receivers"]["prometheus"]["config"]["scrape_configs"]
    objects = render()
    assert job["kubernetes_sd_configs"][0]["namespaces"]["names"] == ["perseus-system"]
    assert kept(job, objects[AGENT]["spec"]["template"]) == ["metrics"]
    assert kept(job, objects[OPERATOR]["spec"]["template"]) == ["metrics"]


def test_every_file_of_rules_and_dashboards_is_rendered(render: Render, tmp_path: Path) -> None:
    chart = tmp_path / "perseus"
    shutil.copytree(CHART, chart)
    for folder in ("rules", "dashboards"):
        shutil.rmtree(chart / "files" / folder, ignore_errors=True)
    values = {
        "metrics": {
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboards": {"enabled": True, "annotations": {"folder": "Energy"}},
        }
    }
    assert not {"PrometheusRule", "ConfigMap"} & kinds(render(values, chart=chart)), "no such files are no error"

    alert = {"alert": "Locked", "expr": "up == 0", "annotations": {"summary": "{{ $labels.node }} is locked"}}
    groups = {"groups": [{"name": "perseus", "rules": [alert]}]}
    (chart / "files" / "rules").mkdir(exist_ok=True)
    (chart / "files" / "rules" / "alerts.yaml").write_text("# a comment\n" + yaml.safe_dump(groups))
    (chart / "files" / "dashboards").mkdir(exist_ok=True)
    board = {"title": "Fleet", "panels": [{"legendFormat": "{{node}}"}]}
    (chart / "files" / "dashboards" / "fleet.json").write_text(json.dumps(board, indent=2))
    objects = render(values, chart=chart)
    rule = objects["PrometheusRule", "perseus-alerts"]
    assert rule["spec"] == groups
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    shown = objects["ConfigMap", "perseus-dashboard-fleet"]
    assert json.loads(shown["data"]["fleet.json"]) == board
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert shown["metadata"]["annotations"] == {"folder": "Energy"}


def test_alerts_link_to_the_runbooks_that_are_published_and_to_no_others(render: Render) -> None:
    def links(**values: str) -> set[str]:
        rendered = render({"metrics": {"prometheusRule": {"enabled": True, **values}}})
        groups = rendered["PrometheusRule", "perseus-rules"]["spec"]["groups"]
        alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
        assert all(alert["annotations"]["description"] for alert in alerts)
        return {alert["annotations"].get("runbook_url", "") for alert in alerts}

    assert links() == {""}
    site = "https://docs.example.com/perseus/runbooks/"
    sections = {heading.lower() for heading in re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)}
    assert links(runbooks=site) == {f"{site}#{section}" for section in sections}


def test_what_reads_metrics_pages_has_no_right_and_no_directory_of_the_node(render: Render) -> None:
    def names(spec: Any) -> list[str]:
        return [each["name"] for each in (*spec["initContainers"], *spec["containers"])]

    assert "reader" not in names(pod(render(), AGENT)), "it is off unless somebody wants it"
    agent = pod(render({"agent": {"reader": {"enabled": True}}}), AGENT)
    [reader] = [each for each in agent["initContainers"] if each["name"] == "reader"]
    [main] = agent["containers"]
    assert reader["restartPolicy"] == "Always"
    assert reader["securityContext"]["runAsNonRoot"]
    assert reader["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not reader.get("env"), "no GPU is asked for"
    assert [mount["name"] for mount in reader["volumeMounts"]] == ["reader"]
    settings = agent_settings(main["args"], environment(main))
    [path] = [word.partition("=")[2] for word in reader["command"] if word.startswith("--socket=")]
    assert settings.reader_socket == path
    assert str(Path(path).parent) == reader["volumeMounts"][0]["mountPath"]
    [private] = [volume for volume in agent["volumes"] if volume["name"] == "reader"]
    assert private["emptyDir"]["medium"] == "Memory"

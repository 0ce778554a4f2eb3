"""Rules: promtool accepts them and their unit tests, every alert has one, and a runbook where its link leads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.observability.conftest import ROOT, RULES

TESTS = RULES.with_name("rules_test.yaml")


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


@pytest.mark.parametrize("command", [["check", "rules", str(RULES)], ["test", "rules", str(TESTS)]])
def test_promtool_agrees(command: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine (Debian: apt-get install prometheus)")
    done = subprocess.run([promtool, *command], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_what_the_collector_of_opentelemetry_is_to_scrape(tmp_path: Path) -> None:
    """Its receiver takes Prometheus' own configuration. Debian's promtool knows no pods: targets are static."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine (Debian: apt-get install prometheus)")
    page = (ROOT / "docs" / "operations.md").read_text()
    [block] = re.findall(r"^```yaml\n(receivers:.*?)^```$", page, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(block)["receivers"]["prometheus"]["config"]
    [job] = config["scrape_configs"]
    [discovery] = job.pop("kubernetes_sd_configs")
    assert discovery["role"] == "pod"
    job["static_configs"] = [{"targets": ["127.0.0.1:9471"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [promtool, "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire_and_to_be_quiet() -> None:
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires} == alerts().keys()


def test_every_recorded_series_is_tested() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    assert {case["expr"] for test in tests for case in test.get("promql_expr_test", ())} == recorded


def test_every_alert_leads_to_its_runbook() -> None:
    site = re.search(r"^site_url: (\S+?)/?$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert site is not None
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert sections == list(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{site[1]}/runbooks/#{name.lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}

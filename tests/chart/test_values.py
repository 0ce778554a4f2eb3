"""Which values the schema accepts, which it refuses, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"
Render = Callable[..., Any]


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def leaves(values: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        found += leaves(value, name) if isinstance(value, dict) and value else [(name, value)]
    return found


def test_lint(helm: Callable[..., str]) -> None:
    output = helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in output
    assert "WARNING" not in output


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("oprator", {}, "oprator"),
        ("agent.socketDir", "/run/x", "socketDir"),
        ("operator.settings.leaseTTL", 60, "leaseTTL"),
        ("operator.settings.insecure", True, "insecure"),
        ("agent.settings.tlsCert", "/x", "tlsCert"),
        ("operator.settings.leaseTtlS", "60s", "leaseTtlS"),
        ("operator.settings.solveWorkers", 0, "solveWorkers"),
        ("operator.settings.logLevel", "TRACE", "logLevel"),
        ("operator.image.tag", "latest", "tag"),
        ("agent.image.tag", "latest", "tag"),
        ("operator.image.repository", "here/perseus:latest", "repository"),
        ("agent.image.digest", "sha256:123", "digest"),
        ("image.pullPolicy", "Sometimes", "pullPolicy"),
        ("agent.terminationGracePeriodSeconds", 5, "terminationGracePeriodSeconds"),
        ("agent.settings.drainTimeoutS", 60, "drainTimeoutS"),
        ("agent.driverUpgradeLabel", "maybe", "driverUpgradeLabel"),
        ("agent.socketDirectory", "run/perseus", "socketDirectory"),
        ("agent.grpcPort", 0, "grpcPort"),
        ("simulatedGpus.count", 0, "count"),
        ("simulatedGpus.count", 17, "count"),
        ("simulatedGpus.image.tag", "latest", "tag"),
        ("simulatedGpus.model", "v100", "model"),
        ("tls.mode", "off", "mode"),
        ("tls.certManager.duration", "90d", "duration"),
        ("operator.namespaces", ["a", "a"], "namespaces"),
        ("networkPolicy.apiServerPorts", [], "apiServerPorts"),
        ("rpc.port", 80, "port"),
        ("rpc.allowedNames", [], "allowedNames"),
        ("rpc.allowedNames", ["a,b"], "allowedNames"),
        ("metrics.podMonitor.interval", "often", "interval"),
    ],
)
def test_an_invalid_value_is_refused_by_name(render: Render, path: str, value: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=r"values don't meet the specifications of the schema") as refused:
        render(nested(path, value))
    assert message in str(refused.value)


def test_two_kinds_of_monitor_are_refused(render: Render) -> None:
    with pytest.raises(RuntimeError, match="at most one, or every series is scraped twice"):
        render({"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}})


@pytest.mark.parametrize("component", ["operator", "agent"])
def test_the_users_secrets_must_be_named(render: Render, component: str) -> None:
    names = {"operator": "a", "agent": "b"} | {component: ""}
    with pytest.raises(RuntimeError, match=rf"tls\.secret\.{component}: name the Secret"):
        render({"tls": {"mode": "secret", "secret": names}})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("global", {"imageRegistry": "of a parent chart"}),
        ("operator.settings.leaseTtlS", 60),
        ("operator.settings.solveTimeoutS", 0.5),
        ("agent.settings.minSwitchIntervalUs", 0),
        ("agent.settings.drainTimeoutS", 25),
        ("agent.terminationGracePeriodSeconds", 30),
        ("agent.nodeSelector", {"pool": "a"}),
        ("tls.certManager.issuerRef", {"name": "ca", "kind": "Issuer"}),
        ("operator.image.digest", f"sha256:{'0' * 64}"),
    ],
)
def test_a_valid_value_is_accepted(render: Render, path: str, value: Any) -> None:
    assert render(nested(path, value))


def refusal(render: Render, values: dict[str, Any]) -> str | None:
    """Return Helm's message if it refuses the values; None if it accepts them."""
    try:
        objects = render(values)
    except RuntimeError as error:
        return str(error)
    assert ("Deployment", "perseus-operator") in objects
    assert "null" not in yaml.safe_dump(objects)
    return None


def test_null_is_refused_by_name_or_renders_without_null(render: Render) -> None:
    """Null removes a default. For every value, templates must work without it or the schema must refuse null."""
    refused = set()
    for path, _ in leaves(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))):
        message = refusal(render, nested(path, None))
        if message is not None:
            assert "don't meet the specifications of the schema" in message, path
            assert path.rpartition(".")[2] in message
            refused.add(path)
    assert {"operator.image.repository", "agent.grpcPort", "crds.keep"} <= refused
    assert not {"agent.tolerations", "operator.resources", "image.registry"} & refused

"""The chart from an OCI registry on a real API server: installed, upgraded from what was before, and back.

Nothing has been released yet, so that the chart of before is the one of the commit before the last that changed it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.chart.conftest import CHART, CRDS, NAMESPACE, Helm, delete_definitions, secrets

from release_build.registry import Registry, serving
from release_build.sources import export

ROOT = CHART.parents[1]
VERSION, BEFORE = "0.1.0", "0.1.0-before"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    builder = [sys.executable, str(ROOT / "deploy" / "control-plane" / "build.py"), "--where", "registry"]
    found = subprocess.run(builder, capture_output=True, text=True, check=False)
    binary = Path(found.stdout.strip()) / "registry"
    if found.returncode or not binary.exists():
        pytest.skip(f"no registry in {binary.parent}: run `make chart-test`. {found.stderr.strip()}")
    with serving(binary, tmp_path / "registry") as running:
        yield running


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The chart of before."""
    changes = ["git", "log", "--format=%H", "--max-count=2", "--", "charts/perseus"]
    found = subprocess.run(changes, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if len(found) < 2:
        pytest.skip("no earlier chart in this clone: its history is too short")
    return export(ROOT, found[1], tmp_path / "source").folder / "charts" / "perseus"


def test_it_is_installed_upgraded_from_the_one_before_and_rolled_back(
    helm: Helm,
    on_server: Callable[..., str],
    api: Any,
    registry: Registry,
    before: Path,
    namespace: str,
    tmp_path: Path,
) -> None:
    for version, chart in ((BEFORE, before), (VERSION, CHART)):
        helm("package", str(chart), "--version", version, "--destination", str(tmp_path))
        helm("push", str(tmp_path / f"perseus-{version}.tgz"), f"oci://{registry.host}/charts", "--plain-http")
    chart = [f"oci://{registry.host}/charts/perseus", "--plain-http"]

    def installed() -> str:
        deployment = client.AppsV1Api(api).read_namespaced_deployment("perseus-operator", NAMESPACE)
        return str(deployment.metadata.labels["helm.sh/chart"])

    on_server("install", "perseus", *chart, "--version", BEFORE)
    assert installed() == f"perseus-{BEFORE}"
    certificates = secrets(api)
    on_server("upgrade", "perseus", *chart, "--version", VERSION, "--reset-then-reuse-values")
    assert installed() == f"perseus-{VERSION}"
    served = {item.metadata.name for item in client.ApiextensionsV1Api(api).list_custom_resource_definition().items}
    assert set(CRDS) <= served
    on_server("rollback", "perseus", "1")
    assert installed() == f"perseus-{BEFORE}"
    assert secrets(api) == certificates
    # Without a version Helm takes the newest that is no pre-release.
    on_server("upgrade", "perseus", *chart, "--reset-then-reuse-values")
    assert installed() == f"perseus-{VERSION}"
    on_server("uninstall", "perseus")
    delete_definitions(api)

"""kubectl, unchanged, against the API server: apply, get, describe, wait, explain, delete."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waiting import PATIENCE_S

Kubectl = Callable[..., str]

CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "cogs.tests.perseus.energy"},
    "spec": {
        "group": "tests.perseus.energy",
        "scope": "Namespaced",
        "names": {"plural": "cogs", "singular": "cog", "kind": "Cog", "shortNames": ["cg"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    {"name": "Teeth", "type": "integer", "jsonPath": ".spec.teeth"},
                    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
                    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "teeth": {"type": "integer", "minimum": 3, "description": "How many teeth."}
                                },
                            },
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}


@pytest.fixture(scope="module")
def kubectl(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """Runs kubectl and returns its output; an error code it is told to expect returns the error text."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl on the PATH")
    cache = tmp_path_factory.mktemp("kubectl")

    def run(*arguments: str, manifest: dict[str, Any] | None = None, fails: bool = False) -> str:
        done = subprocess.run(
            [program, "--kubeconfig", str(kubeconfig), "--cache-dir", str(cache), *arguments],
            input=yaml.safe_dump(manifest) if manifest else None,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture(scope="module")
def cogs(kubectl: Kubectl) -> Iterator[None]:
    assert "created" in kubectl("apply", "-f", "-", manifest=CRD)
    kubectl("wait", "--for=condition=Established", "crd/cogs.tests.perseus.energy", "--timeout=60s")
    yield
    kubectl("delete", "crd", "cogs.tests.perseus.energy")


def cog(teeth: object, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tests.perseus.energy/v1",
        "kind": "Cog",
        "metadata": {"name": "c"},
        "spec": {"teeth": teeth, **spec},
    }


def test_apply_get_describe_and_delete(kubectl: Kubectl, cogs: None, namespace: str) -> None:
    inside = ("-n", namespace)
    assert "c created" in kubectl("apply", *inside, "-f", "-", manifest=cog(8))
    assert "c unchanged" in kubectl("apply", *inside, "-f", "-", manifest=cog(8))
    assert "c configured" in kubectl("apply", *inside, "-f", "-", manifest=cog(9))
    kubectl(
        "patch", "cog", "c", *inside, "--subresource=status", "--type=merge", "-p",
        json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
    )  # fmt: skip
    head, row = kubectl("get", "cg", *inside).splitlines()
    assert head.split() == ["NAME", "TEETH", "READY", "AGE"]
    assert row.split()[:3] == ["c", "9", "True"]
    assert json.loads(kubectl("get", "cog", "c", *inside, "-o", "json"))["metadata"]["generation"] == 2
    kubectl("wait", "cog/c", *inside, "--for=condition=Ready", "--timeout=60s")
    described = kubectl("describe", "cog", "c", *inside)
    assert "Teeth:  9" in described
    assert "Events:" in described
    kubectl("label", "cog", "c", *inside, "tier=front")
    assert kubectl("get", "cogs", *inside, "-l", "tier=front", "-o", "name") == "cog.tests.perseus.energy/c\n"
    assert "deleted" in kubectl("delete", "cog", "c", *inside)
    assert "not found" in kubectl("get", "cog", "c", *inside, fails=True)


def test_a_bad_manifest_is_refused_by_field(kubectl: Kubectl, cogs: None, namespace: str) -> None:
    inside = ("-n", namespace)
    error = kubectl("apply", *inside, "-f", "-", manifest=cog(1), fails=True)
    assert "spec.teeth: Invalid value: 1: spec.teeth in body should be greater than or equal to 3" in error
    error = kubectl("apply", *inside, "-f", "-", manifest=cog(3, teef=1), fails=True)
    assert 'unknown field "spec.teef"' in error
    assert "not found" in kubectl("get", "cog", "c", *inside, fails=True)


def test_server_side_apply_and_dry_run(kubectl: Kubectl, cogs: None, namespace: str) -> None:
    inside = ("-n", namespace)
    kubectl("apply", *inside, "--dry-run=server", "-f", "-", manifest=cog(8))
    assert "not found" in kubectl("get", "cog", "c", *inside, fails=True)
    assert "serverside-applied" in kubectl("apply", *inside, "--server-side", "-f", "-", manifest=cog(8))
    assert "serverside-applied" in kubectl("apply", *inside, "--server-side", "-f", "-", manifest=cog(9))
    assert kubectl("get", "cog", "c", *inside, "-o", "jsonpath={.spec.teeth}") == "9"


def test_explain_reads_the_schema(kubectl: Kubectl, cogs: None) -> None:
    assert "How many teeth." in kubectl("explain", "cog.spec.teeth")


def test_built_in_kinds_are_applied_too(kubectl: Kubectl, namespace: str) -> None:
    inside = ("-n", namespace)
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "p"}, "data": {"profile.csv": "stage"}}
    assert "created" in kubectl("apply", *inside, "-f", "-", manifest=manifest)
    manifest["data"] = {"profile.csv": "stage,instruction"}
    assert "configured" in kubectl("apply", *inside, "-f", "-", manifest=manifest)
    assert kubectl("get", "cm", "p", *inside, "-o", r"jsonpath={.data.profile\.csv}") == "stage,instruction"
    assert "deleted" in kubectl("delete", "cm", "p", *inside)

"""What pages say of a release, tried on a real API server: the commands of installation, and pod security."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from tests.chart.conftest import NAMESPACE, until
from tests.doubles.process_node import ProcessNode

from perseus_agent.devices.nvml import may_write
from perseus_sim.cluster.api_servers import Server

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("level", "component", "violations"),
    [
        ("restricted", "operator", set()),
        ("restricted", "test", set()),
        (
            "restricted",
            "agent",
            {"host namespaces", "unrestricted capabilities", "restricted volume types", "runAsNonRoot != true",
             "runAsUser=0"},
        ),
        ("baseline", "agent", {"host namespaces", "hostPath volumes", "non-default capabilities"}),
    ],
)  # fmt: skip
def test_pod_security_violations_are_those_of_the_security_page(
    render: Callable[..., Any], api: Any, level: str, component: str, violations: set[str]
) -> None:
    objects = render()
    manifest = {
        "operator": lambda: objects["Deployment", "perseus-operator"]["spec"]["template"],
        "agent": lambda: objects["DaemonSet", "perseus-agent"]["spec"]["template"],
        "test": lambda: objects["Pod", "perseus-test"],
    }[component]()
    core = client.CoreV1Api(api)
    name = f"pod-security-{level}-{component}"
    core.create_namespace({"metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": level}}})
    try:
        spec = {**manifest["spec"], "serviceAccountName": "default", "automountServiceAccountToken": False}
        until("the service account is there", lambda: core.list_namespaced_service_account(name).items)
        try:
            core.create_namespaced_pod(name, {"metadata": {"name": "pod"}, "spec": spec}, dry_run="All")
            found: set[str] = set()
        except client.ApiException as error:
            message = json.loads(error.body)["message"]
            assert f'violates PodSecurity "{level}' in message
            found = {part.partition(" (")[0] for part in message.rpartition('": ')[2].split("), ")}
        assert found == violations
    finally:
        core.delete_namespace(name)


def commands(page: Path) -> list[str]:
    """Return the shell blocks of a page, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_install_page(
    helm: Any, api: Any, server: Server, node: ProcessNode, tmp_path: Path
) -> None:
    assert server.plane is not None
    if not may_write():
        pytest.skip("an agent needs CAP_SYS_ADMIN for simulated GPUs too, and this user does not have it")
    path = f"{server.plane.assets}:{helm.environment['PATH']}"
    environment = helm.environment | {"PATH": path, "KUBECONFIG": str(server.kubeconfig)}
    blocks = commands(ROOT / "docs" / "install.md")
    output = ""
    for block in blocks:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        log = node.log_of("perseus")[-4000:] if ran.returncode else ""
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}\n{node.failures}\n{log}"
        print(f"{block}{ran.stdout}")
        output = f"{output}{ran.stdout}"
    # At the end the plan is enforced, and savings are measured.
    assert re.search(r"^gpt3 +True +Ready +Enforce +MaxThroughput +\d+\.\d+% ", output, re.MULTILINE), output
    # The last commands of the page remove everything.
    names = {item.metadata.name for item in client.CoreV1Api(api).list_namespace().items}
    assert NAMESPACE not in names
    assert not yaml.safe_load(json.dumps(client.ApiextensionsV1Api(api).list_custom_resource_definition().items or []))

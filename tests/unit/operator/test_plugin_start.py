"""How ``kubectl perseus`` starts: what it imports, and what it reads of a kubeconfig."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from perseus_core import keys
from perseus_operator.objects.values import ConfigMap
from perseus_operator.plugin import cli


def test_it_starts_without_what_only_the_operator_needs() -> None:
    """Each of them takes a good part of a second to import, several on a busy machine."""
    heavy = {"aiohttp", "kubernetes.aio", "kopf", "ortools", "grpc", "matplotlib", "prometheus_client", "numpy"}
    code = f"import sys, perseus_operator.plugin.cli; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_it_reads_objects_without_the_models_of_every_kind(tmp_path: Path) -> None:
    kept = {
        "metadata": {"name": "profile", "uid": "u"},
        "data": {"a": "b"},
        "binaryData": {"c": "AAE="},
    }
    team = {"metadata": {"name": "team", "labels": {keys.LABEL_CLASS: "frugal"}}}
    answers = {
        "/api/v1/namespaces/team/configmaps/profile": kept,
        "/api/v1/namespaces/team": team,
        "/api/v1/namespaces?labelSelector=perseus.energy/class": {"items": [team]},
        "/apis/perseus.energy/v1alpha1/energyclasses/frugal": {"spec": {}},
        "/apis/perseus.energy/v1alpha1/namespaces/team/servingpools/llama": {"spec": {"mode": "Canary"}},
        "/apis/apps/v1/namespaces/team/deployments/llama": {"spec": {"replicas": 0}},
        "/api/v1/namespaces/team/pods?labelSelector=perseus.energy/job%3Dllama&limit=500": {"items": [team]},
    }

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            answer = json.dumps(found or {"message": f"no {self.path}"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    code = """
import sys
from perseus_operator.errors import KubeNotFound
from perseus_operator.plugin.kube_client import KubeReader
cluster = KubeReader(sys.argv[1], None)
print(cluster.config_map("team", "profile"))
try:
    cluster.config_map("team", "another")
except KubeNotFound as error:
    print(error)
print(cluster.namespace_labels("team"), cluster.namespaces("perseus.energy/class"))
print(cluster.energy_class("frugal"))
print(cluster.pool("team", "llama"), cluster.workload("apps/v1", "deployments", "team", "llama"))
print(len(cluster.pods("team", "perseus.energy/job=llama")))
print("kubernetes.client.models.v1_pod" in sys.modules)
"""
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever).start()
        cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
        context = {"cluster": "c", "user": "u"}
        kubeconfig = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
        command = [sys.executable, "-c", code, str(tmp_path / "kubeconfig")]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            server.shutdown()
    assert found.stderr == ""
    assert found.stdout.splitlines() == [
        str(ConfigMap("profile", {"a": "b"}, {"c": b"\0\1"}, "u")),
        "no /api/v1/namespaces/team/configmaps/another",
        "{'perseus.energy/class': 'frugal'} {'team': {'perseus.energy/class': 'frugal'}}",
        "{'spec': {}}",
        "{'spec': {'mode': 'Canary'}} {'spec': {'replicas': 0}}",
        "1",
        "False",
    ]


def test_a_kubeconfig_without_an_address_is_one_line(tmp_path: Path) -> None:
    """Found beside robusta-dev/krr issue 170: the client of Kubernetes raised ValueError."""
    file = tmp_path / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": "http://[::1:1"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    err = io.StringIO()
    assert cli.run(["list", "--kubeconfig", str(file)], io.StringIO(), err) == cli.USAGE
    assert err.getvalue().startswith("kubectl perseus: no usable kubeconfig: a value cannot be used: ")
    assert len(err.getvalue().splitlines()) == 1


CONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: %s, env: null}}}]
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{ this is: [no yaml", "it is no YAML: while parsing"),
        ("- a\n- b\n", "it is none: "),
        ("hello\n", "it is none: "),
        ("", "is empty"),
        (CONFIG % "no-such-plugin", "No such file or directory: 'no-such-plugin'"),
        (CONFIG % "'true'", "exec: failed to decode process output"),
        ("contexts: null\nusers: null\nclusters: null\n", "Invalid kube-config file"),
    ],
)
def test_what_is_no_kubeconfig_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    """Source: kubernetes-client/python issues 236, 637 and 2219, powerfulseal/powerfulseal issue 283, and
    ansible-collections/community.kubernetes pull request 119.
    """
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    err = io.StringIO()
    assert cli.run(["list", "--kubeconfig", str(file)], io.StringIO(), err) == cli.USAGE
    assert err.getvalue().startswith("kubectl perseus: no usable kubeconfig: ")
    assert message in err.getvalue()
    assert len(err.getvalue().splitlines()) == 1
    assert cli.run(["list", "--kubeconfig", str(tmp_path)], io.StringIO(), err) == cli.USAGE
    assert "Is a directory" in err.getvalue()

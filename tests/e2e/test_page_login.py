"""The page where users of the cluster reach it: a real API server says whose token it is and what that user may see."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_operator.servers.web.access import REMEMBERED_S
from perseus_sim.cluster.api_servers import Feature
from perseus_sim.cluster.simulated_cluster import SYSTEM_NAMESPACE, SimulatedCluster

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
RBAC = "rbac.authorization.k8s.io"
SPEC = {
    "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
    "profile": {"configMapRef": {"name": "absent"}, "blockingPowerMilliwatts": 1},
    "mode": "Recommend",
}


class Page:
    """The operator's page by TLS, verified with the authority of its certificate."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        port = json.loads((cluster.folder / "operator.ready").read_text())["web"].rpartition(":")[2]
        self._base = f"https://127.0.0.1:{port}"
        self._context = ssl.create_default_context(cafile=str(cluster.tls / "ca.crt"))
        self._context.check_hostname = False  # it is that of the Service

    def ask(self, path: str, token: str = "") -> tuple[int, Any]:
        request = urllib.request.Request(self._base + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self._context) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read())

    def jobs(self, token: str) -> set[str]:
        status, found = self.ask("/api/jobs", token)
        assert status == 200, found
        return {f"{job['namespace']}/{job['name']}" for job in found["jobs"]}


def bind(cluster: SimulatedCluster, name: str, role: str, account: str, *, namespace: str, within: str = "") -> None:
    """Bind a cluster role to a service account, in one namespace or in all."""
    cluster.apply(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding" if within else "ClusterRoleBinding",
            "metadata": {"name": name, **({"namespace": within} if within else {})},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }
    )


def test_each_team_sees_its_own_jobs_with_its_own_rights(cluster: SimulatedCluster) -> None:
    if Feature.RBAC not in cluster.server.features:
        pytest.skip(f"the {cluster.server.name} has no accounts")
    core, custom = client.CoreV1Api(cluster.api), client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)
    cluster.apply(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "see-jobs"},
            "rules": [{"apiGroups": [keys.API_GROUP], "resources": [keys.PLURAL], "verbs": ["get"]}],
        }
    )
    for team in ("team-a", "team-b"):
        core.create_namespace({"metadata": {"name": team}})
        core.create_namespaced_service_account(team, {"metadata": {"name": "viewer"}})
        bind(cluster, "viewer", "see-jobs", "viewer", namespace=team, within=team)
        job = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.KIND, "metadata": {"name": "gpt3"}}
        custom.create_namespaced_custom_object(
            keys.API_GROUP, keys.API_VERSION, team, keys.PLURAL, {**job, "spec": SPEC}
        )
    core.create_namespaced_service_account("team-a", {"metadata": {"name": "lead"}})
    bind(cluster, "lead-sees-jobs", "see-jobs", "lead", namespace="team-a")

    def token(account: str, namespace: str, *audiences: str) -> str:
        spec = {"expirationSeconds": 3600, **({"audiences": list(audiences)} if audiences else {})}
        made = core.create_namespaced_service_account_token(account, namespace, {"spec": spec})
        return str(made.status.token)

    certificate = ("--web-cert", str(cluster.tls / "perseus-operator.crt"))
    key = ("--web-key", str(cluster.tls / "perseus-operator.key"))
    operator = cluster.start_operator("--web-address", "0.0.0.0:0", *certificate, *key, "--log-format", "text")
    page = Page(cluster)

    own = token("viewer", "team-a", keys.API_GROUP)
    status, said = page.ask("/api/jobs", own)
    assert (status, said["error"]) == (503, "the operator is busy; try again")
    assert "tokenreviews" in operator.tail(200), "the log says which right is missing"
    bind(cluster, "perseus-page", "system:auth-delegator", "perseus-operator", namespace=SYSTEM_NAMESPACE)
    eventually(lambda: page.ask("/api/jobs", own)[0] == 200, "the operator may not ask who it is", every_s=0.5)

    eventually(lambda: page.jobs(own) == {"team-a/gpt3"}, "the job is not shown", every_s=0.5)
    assert page.ask("/api/jobs/team-a/gpt3", own)[0] == 200
    assert page.ask("/api/jobs/team-b/gpt3", own)[0] == 404
    assert page.jobs(token("viewer", "team-b")) == {"team-b/gpt3"}, "a token for the API server, too"
    assert page.jobs(token("lead", "team-a", keys.API_GROUP)) == {"team-a/gpt3", "team-b/gpt3"}
    for unknown in ("", "made-up", token("viewer", "team-a", "somebody-else")):
        assert page.ask("/api/jobs", unknown)[0] == 401

    # A token for the page alone opens nothing else, so it harms nobody if it is stolen, or the page were.
    elsewhere = client.Configuration()
    elsewhere.host, elsewhere.ssl_ca_cert = cluster.api.configuration.host, cluster.api.configuration.ssl_ca_cert
    with client.ApiClient(elsewhere, "Authorization", f"Bearer {own}") as thief, pytest.raises(ApiException) as refused:
        client.CustomObjectsApi(thief).list_namespaced_custom_object(
            keys.API_GROUP, keys.API_VERSION, "team-a", keys.PLURAL
        )
    assert refused.value.status == 401

    client.RbacAuthorizationV1Api(cluster.api).delete_namespaced_role_binding("viewer", "team-a")
    eventually(
        lambda: page.jobs(own) == set(), "what was allowed stays visible", every_s=1, patience_s=REMEMBERED_S + 30
    )

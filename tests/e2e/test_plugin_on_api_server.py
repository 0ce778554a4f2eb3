"""``kubectl perseus`` as users run it: a program, a kubeconfig, a job that an operator keeps.

On a server with RBAC its callers have the cluster roles ``view`` and ``edit``, as the chart extends them, in one
namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_operator.api.schema import dump
from perseus_operator.api.serving.status import LengthClass, LengthsFrom, LengthsStatus
from perseus_operator.families.serving.plan_work import plan_status
from perseus_operator.solving.serving_plan import PoolRow, ServingPlan
from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Feature, Server
from perseus_sim.profiles import profile_csv

pytestmark = pytest.mark.e2e

PROGRAM = Path(sys.executable).with_name("kubectl-perseus")
USER_ROLES = Path(__file__).resolve().parents[2] / "charts" / "perseus" / "templates" / "user-roles.yaml"
PAIR = {"pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 2}}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def perseus(server: Server, namespace: str) -> Run:
    def run(*arguments: str, kubeconfig: Path = server.kubeconfig) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "COLUMNS": "100"}
        command = [str(PROGRAM), *arguments, "-n", namespace]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    return run


def document(answer: subprocess.CompletedProcess[str]) -> Any:
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_what_is_not_there_yet_is_said_with_its_reason(world: Any, perseus: Run) -> None:
    answer = perseus("frontier", "gpt3")
    assert answer.returncode == 1
    assert answer.stderr == f"kubectl perseus: there is no PerseusJob gpt3 in namespace {world.namespace}\n"
    world.create()
    world.until_condition("ProfileReady", "False", "ConfigMapNotFound")
    answer = perseus("explain", "gpt3")
    assert answer.returncode == 1
    assert "gpt3 has no frontier yet: ConfigMapNotFound: " in answer.stderr
    assert answer.stdout == ""


def test_a_frontier_its_plans_and_why_none_is_in_force(world: Any, perseus: Run) -> None:
    world.profile(profile_csv=profile_csv(2))
    world.create(**PAIR)
    world.until_condition("Ready", "True", "Ready")
    frontier = document(perseus("frontier", "gpt3", "-o", "json"))
    figures = world.job()["status"]["frontier"]
    times = [point["iterationTimeMicroseconds"] for point in frontier["points"]]
    assert (len(times), times[0], times[-1]) == (
        figures["points"],
        figures["minimumTimeMicroseconds"],
        figures["slowestTimeMicroseconds"],
    )
    assert "joules over seconds" in perseus("frontier", "gpt3").stdout
    plan = document(perseus("plan", "gpt3", "--point", "0", "-o", "json"))
    assert len(plan["stages"]) == 2
    answer = perseus("plan", "gpt3")
    assert answer.returncode == 1
    assert "runs no plan: RecommendOnly: " in answer.stderr
    diagnosis = document(perseus("doctor", "gpt3", "-o", "json"))
    found = {step["condition"]: step["finding"] for step in diagnosis["steps"]}
    assert (found["FrontierReady"], found["AgentsReady"]) == ("good", "fault")
    (listed,) = document(perseus("list", "-o", "json"))["jobs"]
    assert (listed["name"], listed["mode"], listed["state"]) == ("gpt3", "Recommend", "Ready")
    why = {row["what"]: row["says"] for row in document(perseus("explain", "gpt3", "-o", "json"))["why"]}
    assert "RecommendOnly" in why["mode"]


@pytest.mark.on_both
@pytest.mark.usefixtures("crd")
def test_the_plan_of_a_pool_is_stored_as_it_is_and_printed_as_manifests(api: Any, namespace: str, perseus: Run) -> None:
    pools = (keys.API_GROUP, keys.API_VERSION, namespace, keys.POOL_PLURAL)
    custom, metadata = client.CustomObjectsApi(api), {"name": "chat", "namespace": namespace}
    body = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.POOL_KIND, "metadata": metadata}
    custom.create_namespaced_custom_object(*pools, {**body, "spec": {}})
    split = tuple(PoolRow(name, 0.5, 4, 3, 1, 1_200, 1.8e9) for name in ("prompt-s", "prompt-ml"))
    plan = dump(plan_status(ServingPlan(split, 3.6e9, 4e9, 3.6e9, 2, 0.001, together=True), "2026-11-30T10:00:00Z"))
    seen = LengthClass(name="prompt-s-answer-m", share="100.00%", prompt_tokens=90, output_tokens=210)
    lengths = dump(LengthsStatus(requests=120, source=LengthsFrom.REQUESTS, classes=(seen,)))
    custom.patch_namespaced_custom_object_status(*pools, "chat", {"status": {"plan": plan, "lengths": lengths}})
    stored = custom.get_namespaced_custom_object(*pools, "chat")["status"]
    assert (stored["plan"], stored["lengths"]) == (plan, lengths), "the CRD prunes nothing of it"
    assert "10.00% is saved" in perseus("serving", "plan", "chat").stdout
    manifests = document(perseus("serving", "plan", "chat", "--gateway", "inference"))["items"]
    assert [one["metadata"]["name"] for one in manifests] == ["chat-prompt-s", "chat-prompt-ml", "inference-classes"]


def test_a_straggler_is_told_and_taken_back(world: Any, perseus: Run) -> None:
    world.profile(profile_csv=profile_csv(2))
    world.create(**PAIR)
    world.until_condition("Ready", "True", "Ready")
    assert perseus("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "1.2").returncode == 0
    message = world.until_condition("StragglerDetected", "True", "StragglerDeclared")
    assert "Pipeline 1 is declared 20.00% slower" in message
    told = document(perseus("straggler", "set", "gpt3", "--pipeline", "0", "--slowdown", "1.5", "-o", "json"))
    assert told["annotation"] == "1:0:1.2,0:0:1.5"
    assert perseus("straggler", "clear", "gpt3", "--pipeline", "0").returncode == 0
    assert perseus("straggler", "clear", "gpt3").returncode == 0
    world.until_condition("StragglerDetected", "False", "NoStraggler")
    assert keys.ANNOTATION_STRAGGLER not in world.job()["metadata"].get("annotations", {})


@pytest.mark.needs(Feature.RBAC, Feature.CONTROLLERS)
def test_who_views_sees_everything_and_who_edits_may_tell(
    world: Any, perseus: Run, api: Any, server: Server, tmp_path: Path
) -> None:
    """The built-in roles, extended by the chart's, give what the plugin needs."""
    roles = client.RbacAuthorizationV1Api(api)
    plain = "\n".join(line for line in USER_ROLES.read_text().splitlines() if "{{" not in line)
    made = []
    for role in yaml.safe_load_all(plain):
        (verb,) = {label.rpartition("-")[2] for label in role["metadata"]["labels"]} - {"admin"}
        role["metadata"]["name"] = f"perseus-{verb}"
        made.append(role["metadata"]["name"])
        roles.create_cluster_role(role)
    kubeconfigs: dict[str, Path] = {}
    for verb in ("view", "edit"):
        world.core.create_namespaced_service_account(world.namespace, {"metadata": {"name": verb}})
        subject = {"kind": "ServiceAccount", "name": verb, "namespace": world.namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": verb}
        binding: Any = {"metadata": {"name": verb}, "roleRef": reference, "subjects": [subject]}
        roles.create_namespaced_role_binding(world.namespace, binding)
        kubeconfigs[verb] = rbac.log_in(server.kubeconfig, world.namespace, verb, tmp_path / verb)
    world.profile(profile_csv=profile_csv(2))
    world.create(**PAIR)
    world.until_condition("Ready", "True", "Ready")
    tell = ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "1.2")

    def ready() -> bool:  # the roles are put together by a controller
        seen = perseus("explain", "gpt3", kubeconfig=kubeconfigs["view"]).returncode == 0
        return seen and perseus(*tell, kubeconfig=kubeconfigs["edit"]).returncode == 0

    try:
        world.until("seen by who may view, told by who may edit", ready)
        for command in (("frontier", "gpt3"), ("plan", "gpt3", "--point", "1")):
            assert perseus(*command, kubeconfig=kubeconfigs["view"]).returncode == 0
        answer = perseus("straggler", "clear", "gpt3", kubeconfig=kubeconfigs["view"])
        assert answer.returncode == 1
        assert "cannot patch resource" in answer.stderr
    finally:
        for name in made:
            roles.delete_cluster_role(name)


def test_kubectl_finds_it(world: Any, server: Server, namespace: str) -> None:
    beside = server.plane.assets if server.plane else None
    kubectl = shutil.which("kubectl", path=beside) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: that it finds the plugin was not looked at")
    world.profile(profile_csv=profile_csv(2))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    environment = {"PATH": str(PROGRAM.parent), "KUBECONFIG": str(server.kubeconfig)}
    command = [kubectl, "perseus", "frontier", "gpt3", "-n", namespace, "-o", "yaml"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert answer.returncode == 0, answer.stderr
    assert yaml.safe_load(answer.stdout)["job"] == f"{namespace}/gpt3"

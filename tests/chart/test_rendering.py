"""What the chart renders: with toggles on and off, with zero and null; and promises that a manifest can prove."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.conftest import (
    CHART,
    Objects,
)
from tests.chart.manifests import (
    AGENT,
    OPERATOR,
    POLICY,
    Render,
    container,
    environment,
    kinds,
    pod,
    pods,
)

from perseus_agent.settings import parse_settings as agent_settings
from perseus_core import keys
from perseus_operator.controller.settings import parse_settings as operator_settings


@pytest.mark.parametrize("certificates", ["generated", "certManager"])
def test_everything_is_labelled_and_annotated_and_in_the_namespace(render: Render, certificates: str) -> None:
    monitored = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    everything = {
        "commonLabels": {"team": "energy"},
        "commonAnnotations": {"example.com/owner": "energy", "helm.sh/resource-policy": "ours is stronger"},
        "metrics": {each: {"enabled": True} for each in monitored} | {"podMonitor": {"enabled": False}},
        "simulatedGpus": {"enabled": True, "offeredAs": "DynamicResources"},
        "webhook": {"enabled": True},
        "web": {"enabled": True},
        "solver": {"enabled": True, "autoscaling": {"enabled": True}},
        "acceptance": {"enabled": True},
        "tls": {"mode": certificates},
    }
    for (kind, name), body in render(everything).items():
        labels = body["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "perseus", (kind, name)
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["team"] == "energy"
        annotations = body["metadata"]["annotations"]
        assert annotations["example.com/owner"] == "energy", (kind, name)
        kept = annotations["helm.sh/resource-policy"]
        assert kept == ("keep" if kind == "CustomResourceDefinition" else "ours is stronger")
        cluster_wide = kind in (
            *("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "MutatingWebhookConfiguration"),
            *("EnergyClass", "DeviceClass"),
        )
        assert body["metadata"].get("namespace") == (None if cluster_wide else "perseus-system"), (kind, name)


def test_the_programs_accept_what_the_chart_gives_them(render: Render) -> None:
    values = {
        "operator": {
            "settings": {"leaseTtlS": 90, "solveMemoryMib": 16777216, "logLevel": "DEBUG"},
            "metricsPort": 1234,
        },
        "agent": {"settings": {"minSwitchIntervalUs": 2500000, "drainTimeoutS": 12.5}, "grpcPort": 5678},
    }
    objects = render(values)
    main = container(objects, OPERATOR)
    settings = operator_settings(main["args"], environment(main))
    assert (settings.lease_ttl_s, settings.solve_memory_mib, settings.log_level) == (90, 16777216, "DEBUG")
    assert settings.agent_namespace == "perseus-system"
    assert not settings.insecure
    assert settings.metrics_address.endswith(":1234")
    assert main["ports"] == [{"name": "metrics", "containerPort": 1234}]

    main = container(objects, AGENT)
    given = agent_settings(main["args"], environment(main))
    assert (given.min_switch_interval_us, given.drain_timeout_s) == (2500000, 12.5)
    assert not given.insecure
    assert {port["name"]: port["containerPort"] for port in main["ports"]}[keys.AGENT_GRPC_PORT_NAME] == 5678
    assert given.grpc_address.endswith(":5678")
    mounts = {mount["mountPath"]: mount for mount in main["volumeMounts"]}
    for path in (given.socket, given.journal, given.pod_resources_socket, given.tls_key):
        assert str(Path(path).parent) in mounts, path
    assert mounts["/var/lib/kubelet/pod-resources"]["readOnly"]
    assert not any("subPath" in mount for mount in mounts.values()), "a subPath does not get renewed certificates"
    assert agent_settings([], {"PERSEUS_AGENT_INSECURE": "true"}).socket == given.socket, "the clients' default"


def test_the_operator_finds_the_agents(render: Render) -> None:
    objects = render()
    labels = objects[AGENT]["spec"]["template"]["metadata"]["labels"]
    assert labels[keys.LABEL_COMPONENT] == keys.COMPONENT_AGENT
    assert objects[AGENT]["metadata"]["namespace"] == "perseus-system"


def test_a_new_chart_with_the_same_programs_restarts_nothing(render: Render, tmp_path: Path) -> None:
    chart = tmp_path / "perseus"
    shutil.copytree(CHART, chart)
    about = chart / "Chart.yaml"
    about.write_text(about.read_text().replace("version: 0.1.0\n", "version: 9.9.9\n", 1))
    before, after = render(), render(chart=chart)
    for key in (OPERATOR, AGENT):
        assert after[key]["metadata"]["labels"]["helm.sh/chart"] == "perseus-9.9.9"
        assert after[key]["spec"]["template"] == before[key]["spec"]["template"]


def test_an_upgrade_starts_an_operator_before_it_stops_one_and_probes_are_on_progress(render: Render) -> None:
    objects = render()
    spec = objects[OPERATOR]["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    for key in (OPERATOR, AGENT):
        main = container(objects, key)
        assert main["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
        assert main["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert main["startupProbe"]["periodSeconds"] == 1, "a rolling upgrade waits for it on every node"


def test_replicas_find_each_other_and_one_alone_opens_no_port_for_it(render: Render) -> None:
    alone, several = render(), render({"operator": {"replicas": 3, "peerPort": 9999}})
    assert "peer" not in json.dumps(alone[OPERATOR]) + json.dumps(alone[POLICY])
    assert "topologySpreadConstraints" not in pod(alone, OPERATOR)
    assert several[OPERATOR]["spec"]["replicas"] == 3
    main = container(several, OPERATOR)
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in main["env"]
    settings = operator_settings(main["args"], {})
    assert (settings.peer_address, settings.peer_host) == ("0.0.0.0:9999", "$(POD_IP)")
    assert {"name": "peer", "containerPort": 9999} in main["ports"]
    [spread] = pod(several, OPERATOR)["topologySpreadConstraints"]
    labels = several[OPERATOR]["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    policy = several[POLICY]["spec"]
    for rules, side, port in ((policy["ingress"], "from", "peer"), (policy["egress"], "to", 9999)):
        [rule] = [rule for rule in rules if {"port": port, "protocol": "TCP"} in rule["ports"]]
        assert [each["podSelector"]["matchLabels"] for each in rule[side]] == [spread["labelSelector"]["matchLabels"]]


def test_images(render: Render) -> None:
    app_version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    objects = render()
    assert container(objects, OPERATOR)["image"] == f"perseus-operator:{app_version}"
    assert container(objects, AGENT)["image"] == f"perseus-agent:{app_version}"
    digest = f"sha256:{'a' * 64}"
    image = {"repository": "team/agent", "tag": "7", "digest": digest}
    objects = render({"image": {"registry": "registry.example:5000"}, "agent": {"image": image}})
    assert container(objects, AGENT)["image"] == f"registry.example:5000/team/agent@{digest}"


def test_the_operator_is_restricted(render: Render) -> None:
    objects = render()
    operator = pod(objects, OPERATOR)
    assert operator["securityContext"]["runAsNonRoot"]
    assert operator["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for main in operator["containers"]:
        assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not main["securityContext"]["allowPrivilegeEscalation"]
        assert main["securityContext"]["readOnlyRootFilesystem"]


def test_no_pod_of_the_release_requests_a_gpu(render: Render) -> None:
    for simulated in (False, True):
        for spec in pods(render({"simulatedGpus": {"enabled": simulated}})):
            assert "nvidia.com/gpu" not in json.dumps([c.get("resources") for c in spec["containers"]])


def test_with_all_toggles_off_only_the_operator_is_rendered(render: Render) -> None:
    off = {
        "crds": {"enabled": False},
        "rbac": {"create": False, "aggregateUserRoles": False},
        "operator": {"serviceAccount": {"create": False, "name": "mine"}},
        "agent": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "platform": {"priorityQuota": False},
        "tls": {"mode": "secret", "secret": {"operator": "mine-tls", "agent": "agent-tls"}},
    }
    objects = render(off, "--no-hooks")
    assert set(objects) == {OPERATOR}
    operator = pod(objects, OPERATOR)
    assert operator["serviceAccountName"] == "mine"
    assert [v["secret"]["secretName"] for v in operator["volumes"] if "secret" in v] == ["mine-tls"]


@pytest.mark.parametrize("plural", keys.PLURALS)
def test_a_crd_is_kept_by_default(render: Render, plural: str) -> None:
    key = ("CustomResourceDefinition", f"{plural}.perseus.energy")
    crd = render()[key]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in render({"crds": {"keep": False}})[key]["metadata"]
    plain = yaml.safe_load((CHART.parents[1] / "deploy" / "crds" / f"{plural}.yaml").read_text(encoding="utf-8"))
    assert crd["spec"] == plain["spec"]


def test_with_named_namespaces_the_operator_has_rights_only_there(render: Render) -> None:
    name = "perseus-system-perseus-operator"
    everywhere = render()
    assert ("ClusterRoleBinding", name) in everywhere
    bound = [name for kind, name in render({}, "--no-hooks") if kind == "RoleBinding"]
    assert bound == [f"{name}-epoch"], "and the counter of epochs beside the agents"
    objects = render({"operator": {"namespaces": ["team-a", "team-b"]}})
    assert "ClusterRoleBinding" not in kinds(objects)
    bindings = {name, f"{name}-epoch", f"team-a/{name}", f"team-b/{name}"}
    assert {name for kind, name in objects if kind == "RoleBinding" and "operator" in name} == bindings
    main = container(objects, OPERATOR)
    assert operator_settings(main["args"], environment(main)).namespace_list == ("team-a", "team-b")
    own = container(everywhere, OPERATOR)
    assert operator_settings(own["args"], environment(own)).namespace_list == ()


def test_namespaces_of_tenants_get_a_quota_where_they_are_named(render: Render) -> None:
    def quotas(objects: Objects) -> dict[str, Any]:
        found = {name: body["spec"]["hard"] for (kind, name), body in objects.items() if kind == "ResourceQuota"}
        return {name: hard for name, hard in found.items() if "count/perseusjobs.perseus.energy" in hard}

    assert quotas(render()) == {}
    hard = {"count/perseusjobs.perseus.energy": "40"}
    named = render({"jobQuota": {"namespaces": ["team-a", "team-b"], "count": 40}})
    assert quotas(named) == {"team-a/perseus-jobs": hard, "team-b/perseus-jobs": hard}


@pytest.mark.parametrize("namespaces", [[], ["team-a"]])
def test_slices_may_be_read_only_where_that_is_wanted(render: Render, namespaces: list[str]) -> None:
    role = ("ClusterRole", "perseus-system-perseus-operator-slices")
    assert role not in render({"operator": {"namespaces": namespaces}})
    objects = render({"operator": {"namespaces": namespaces, "settings": {"resourceSlices": True}}})
    assert objects[role]["rules"] == [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list"]}
    ]
    assert objects["ClusterRoleBinding", role[1]]["roleRef"]["name"] == role[1]
    main = container(objects, OPERATOR)
    assert operator_settings(main["args"], environment(main)).resource_slices is True


def test_the_user_roles(render: Render) -> None:
    objects = render()
    view = objects["ClusterRole", "perseus-system-perseus-view"]
    edit = objects["ClusterRole", "perseus-system-perseus-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-admin"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {resource for rule in edit["rules"] for resource in rule["resources"]} == {
        "perseusjobs",
        "perseusprofiles",
        "servingpools",
    }, "no status, no frontier, no budget"


def test_network_policies(render: Render) -> None:
    objects = render({"networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]}, "agent": {"grpcPort": 5678}})
    agent = objects["NetworkPolicy", "perseus-agent"]["spec"]
    assert agent["policyTypes"] == ["Ingress", "Egress"]
    assert not agent.get("egress"), "an agent opens no connections"
    commands = next(rule for rule in agent["ingress"] if rule["ports"][0]["port"] == "grpc")
    [peer] = commands["from"]
    assert peer["podSelector"]["matchLabels"][keys.LABEL_COMPONENT] == "perseus-operator"
    operator = objects["NetworkPolicy", "perseus-operator"]["spec"]
    assert [rule["ports"][0]["port"] for rule in operator["egress"] if "to" in rule] == [5678]
    assert all(
        rule["from"] == [{"namespaceSelector": {}}]
        for spec in (agent, operator)
        for rule in spec["ingress"]
        if rule["ports"][0]["port"] == "metrics"
    )


def test_the_catalogue_lists_every_definition(render: Render) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    listed = {crd["name"] for crd in yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])}
    assert listed == {name for kind, name in render() if kind == "CustomResourceDefinition"}

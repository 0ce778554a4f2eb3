"""What the chart renders: with toggles on and off, with zero and null; and promises that a manifest can prove."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from perseus_agent.settings import parse_settings as agent_settings
from perseus_bench.options import parse_options as accept_options
from perseus_core import keys
from perseus_operator.controller.settings import parse_settings as operator_settings
from perseus_sim.gpus.dynamic_resources import DRIVER
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.shim_gpu import STATE

CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"
RUNBOOKS = CHART.parents[1] / "docs" / "runbooks.md"
OPERATOR, AGENT = ("Deployment", "perseus-operator"), ("DaemonSet", "perseus-agent")
POLICY = ("NetworkPolicy", "perseus-operator")
SIMULATOR = ("DaemonSet", "perseus-gpu-sim")
Objects = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Objects]


def pod(objects: Objects, key: tuple[str, str]) -> Any:
    return objects[key]["spec"]["template"]["spec"]


def container(objects: Objects, key: tuple[str, str]) -> Any:
    return pod(objects, key)["containers"][0]


def environment(container: Any) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}


def kinds(objects: Objects) -> set[str]:
    return {kind for kind, _ in objects}


def pods(objects: Objects) -> Iterator[Any]:
    for (kind, _), body in objects.items():
        if kind in ("Deployment", "DaemonSet"):
            yield body["spec"]["template"]["spec"]
        elif kind == "Pod":
            yield body["spec"]


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


def test_agents_can_have_a_namespace_of_their_own(render: Render) -> None:
    """Then the release's namespace can enforce the standard that the operator meets.

    Every object that connects operator and agents must name both namespaces.
    """
    objects = render({
        "agent": {"namespaceOverride": "gpu-agents"},
        "operator": {"namespaces": ["team-a"]},
        "metrics": {"podMonitor": {"enabled": True}},
        "simulatedGpus": {"enabled": True},
        "webhook": {"enabled": True},
    })  # fmt: skip
    in_agents = {key for key, body in objects.items() if body["metadata"].get("namespace") == "gpu-agents"}
    assert in_agents == {
        ("DaemonSet", "gpu-agents/perseus-agent"),
        ("DaemonSet", "gpu-agents/perseus-gpu-sim"),
        ("NetworkPolicy", "gpu-agents/perseus-agent"),
        ("NetworkPolicy", "gpu-agents/perseus-gpu-sim"),
        ("ResourceQuota", "gpu-agents/perseus-critical-pods"),
        ("Role", "gpu-agents/perseus-system-perseus-operator-epoch"),
        ("Role", "gpu-agents/perseus-test-agents"),
        ("RoleBinding", "gpu-agents/perseus-system-perseus-operator"),
        ("RoleBinding", "gpu-agents/perseus-system-perseus-operator-epoch"),
        ("RoleBinding", "gpu-agents/perseus-test-agents"),
        ("Secret", "gpu-agents/perseus-agent-tls"),
    }
    main = container(objects, OPERATOR)
    assert operator_settings(main["args"], environment(main)).agent_namespace == "gpu-agents"
    [*_, to_agents] = objects["NetworkPolicy", "perseus-operator"]["spec"]["egress"]
    assert named(to_agents["to"]) == ["gpu-agents"]
    [commands, _] = objects["NetworkPolicy", "gpu-agents/perseus-agent"]["spec"]["ingress"]
    assert named(commands["from"]) == ["perseus-system"]
    monitor = objects["PodMonitor", "perseus"]["spec"]
    assert monitor["namespaceSelector"] == {"matchNames": ["perseus-system", "gpu-agents"]}
    [hook] = objects["MutatingWebhookConfiguration", "perseus-system-perseus-webhook"]["webhooks"]
    assert hook["namespaceSelector"]["matchExpressions"][0]["values"] == ["kube-system", "perseus-system", "gpu-agents"]


def test_certificates_of_two_namespaces_need_an_issuer_for_both(render: Render) -> None:
    apart = {"agent": {"namespaceOverride": "gpu-agents"}}
    with pytest.raises(RuntimeError, match=r"issuerRef: with agent\.namespaceOverride name a ClusterIssuer"):
        render({**apart, "tls": {"mode": "certManager"}})
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    reserved = {"issuerRef": issuer, "allowClusterIssuer": True}
    objects = render({**apart, "tls": {"mode": "certManager", "certManager": reserved}})
    assert {name for kind, name in objects if kind == "Certificate"} == {
        "perseus-operator-tls",
        "gpu-agents/perseus-agent-tls",
    }


def named(peers: list[Any]) -> list[str]:
    return [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers]


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


def test_the_agent_has_these_exceptions_and_no_others(render: Render) -> None:
    objects = render()
    agent = pod(objects, AGENT)
    assert agent["hostPID"]
    assert not agent["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostIPC"} & set(agent)
    security = agent["containers"][0]["securityContext"]
    assert agent["initContainers"][0]["securityContext"] == security
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"]
    assert "privileged" not in security
    assert {v["hostPath"]["path"] for v in agent["volumes"] if "hostPath" in v} == {
        "/run/perseus",
        "/var/lib/perseus",
        "/var/lib/kubelet/pod-resources",
        "/var/lib/kubelet/device-plugins",
    }
    without = pod(render({"agent": {"socketResource": False}}), AGENT)
    assert "device-plugins" not in json.dumps(without)
    privileged = container(render({"agent": {"privileged": True}}), AGENT)["securityContext"]
    assert privileged["privileged"]
    assert not {"capabilities", "allowPrivilegeEscalation"} & set(privileged), "the API server refuses both together"


@pytest.mark.parametrize("simulated", [False, True])
def test_the_clock_keeper_is_a_sidecar_that_has_what_it_needs_of_the_agent_and_no_more(
    render: Render, simulated: bool
) -> None:
    mount = {"name": "driver", "mountPath": "/driver"}
    agent = pod(
        render({"simulatedGpus": {"enabled": simulated}, "agent": {"extraVolumeMounts": [mount]}}),
        AGENT,
    )
    [keeper], [main] = agent["initContainers"], agent["containers"]
    assert keeper["restartPolicy"] == "Always", "the kubelet starts it first, ends it last, and whenever it ends"
    assert keeper["args"] == ["keep", *main["args"]], "no setting can differ"
    assert (keeper["env"], keeper["image"]) == (main["env"], main["image"])
    assert keeper["securityContext"] == main["securityContext"]
    assert keeper["resources"]["limits"]["memory"], "what the agent uses up is not the keeper's"
    settings = agent_settings(main["args"], environment(main))
    shared = {mount["name"]: mount["mountPath"] for mount in keeper["volumeMounts"]}
    assert set(shared) == {"keeper", "state", "driver"} | ({"simulated-gpus"} if simulated else set())
    assert set(shared.items()) <= {(mount["name"], mount["mountPath"]) for mount in main["volumeMounts"]}
    assert str(Path(settings.keeper_socket).parent) == shared["keeper"]
    assert str(Path(settings.journal).parent) == shared["state"]
    [private] = [volume for volume in agent["volumes"] if volume["name"] == "keeper"]
    assert private["emptyDir"]["medium"] == "Memory"


def test_no_pod_of_the_release_requests_a_gpu(render: Render) -> None:
    for simulated in (False, True):
        for spec in pods(render({"simulatedGpus": {"enabled": simulated}})):
            assert "nvidia.com/gpu" not in json.dumps([c.get("resources") for c in spec["containers"]])


def test_the_agent_has_time_to_reset_clocks(render: Render) -> None:
    grace = pod(render(), AGENT)["terminationGracePeriodSeconds"]
    assert grace > agent_settings([], {"PERSEUS_AGENT_INSECURE": "true"}).drain_timeout_s


def node_matches(agent: Any, labels: dict[str, str]) -> bool:
    """Return whether the scheduler would accept a node: terms are ORed, and expressions and the node selector ANDed."""
    holds = {
        "In": lambda e: labels.get(e["key"]) in e["values"],
        "NotIn": lambda e: labels.get(e["key"]) not in e["values"],
        "DoesNotExist": lambda e: e["key"] not in labels,
    }
    affinity = agent.get("affinity")
    if affinity:
        required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        terms = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
        if not any(all(holds[e["operator"]](e) for e in term) for term in terms):
            return False
    return all(labels.get(key) == value for key, value in agent.get("nodeSelector", {}).items())


GPU_LABELS = [
    {"feature.node.kubernetes.io/pci-10de.present": "true"},
    # NVIDIA/k8s-device-plugin issue 1213, siderolabs/talos issue 12103: as Node Feature Discovery installs itself
    {"feature.node.kubernetes.io/pci-0302_10de.present": "true"},
    {"feature.node.kubernetes.io/pci-0300_10de.present": "true"},
    {"feature.node.kubernetes.io/cpu-model.vendor_id": "NVIDIA"},
    {"nvidia.com/gpu.present": "true"},
]


@pytest.mark.parametrize("gpu", GPU_LABELS)
@pytest.mark.parametrize(
    ("mode", "runs_where_client_is"),
    [
        ("affinity", {None: True, "true": True, "paused-for-mig-change": False, "paused-for-driver-upgrade": False}),
        ("nodeSelector", {None: False, "true": True, "paused-for-mig-change": False}),
        ("ignore", {None: True, "true": True, "paused-for-driver-upgrade": True}),
    ],
)
def test_agents_run_on_gpu_nodes_and_stop_for_a_driver_upgrade(
    render: Render, gpu: dict[str, str], mode: str, runs_where_client_is: dict[str | None, bool]
) -> None:
    agent = pod(render({"agent": {"driverUpgradeLabel": mode}}), AGENT)
    for client, runs in runs_where_client_is.items():
        label = {} if client is None else {"nvidia.com/gpu.deploy.client": client}
        assert node_matches(agent, gpu | label) is runs, (client, mode)
    assert not node_matches(agent, {"nvidia.com/gpu.deploy.client": "true"})


RELEASED = [
    {keys.LABEL_RELEASE_GPUS: "true"},
    {"nvidia.com/gpu-driver-upgrade-state": "pod-deletion-required"},
    {"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"},
    {"nvidia.com/gpu.deploy.device-plugin": "false"},  # NVSentinel before it resets a GPU
    {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"},
]
KEPT = [
    {keys.LABEL_RELEASE_GPUS: "false"},
    {"nvidia.com/gpu-driver-upgrade-state": "wait-for-jobs-required"},  # training goes on
    {"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"},
    {"nvidia.com/gpu.deploy.device-plugin": "true"},
]


@pytest.mark.parametrize("gpu", [*GPU_LABELS, None])
@pytest.mark.parametrize("mode", ["affinity", "nodeSelector", "ignore"])
def test_an_agent_releases_its_gpus_on_request(render: Render, gpu: dict[str, str] | None, mode: str) -> None:
    """By leaving the node: the DaemonSet's controller deletes the pod of a node that does not match any more."""
    simulated = {"simulatedGpus": {"enabled": gpu is None}}
    agent = pod(render({**simulated, "agent": {"driverUpgradeLabel": mode}}), AGENT)
    node = (gpu or {}) | {"nvidia.com/gpu.deploy.client": "true"}
    assert [labels for labels in RELEASED if node_matches(agent, node | labels)] == []
    assert [labels for labels in KEPT if not node_matches(agent, node | labels)] == []


def test_labels_of_release_can_be_chosen(render: Render) -> None:
    agent = pod(render({"agent": {"releaseLabels": [{"key": "maintenance", "values": ["now", "soon"]}]}}), AGENT)
    for gpu in GPU_LABELS:
        assert node_matches(agent, gpu | RELEASED[0])
        assert not node_matches(agent, gpu | {"maintenance": "soon"})
    agent = pod(render({"agent": {"releaseLabels": []}, "simulatedGpus": {"enabled": True}}), AGENT)
    assert "affinity" not in agent


ACCEPT = ("Pod", "perseus-accept")


def test_acceptance_is_off_and_runs_where_the_agent_was_sent_away(render: Render) -> None:
    assert ACCEPT not in render()
    objects = render({"acceptance": {"enabled": True, "minutes": 2.5}, "agent": {"runtimeClassName": "nvidia"}})
    accept, agent = objects[ACCEPT]["spec"], pod(objects, AGENT)
    [container] = accept["containers"]
    options = accept_options(container["args"], environment(container))
    assert options.minutes == 2.5
    assert (
        options.journal == agent_settings(agent["containers"][0]["args"], environment(agent["containers"][0])).journal
    )
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    version = agent["containers"][0]["image"].partition(":")[2]
    assert container["image"] == f"perseus-bench:{version}"
    assert accept["runtimeClassName"] == "nvidia"
    for gpu in GPU_LABELS:
        assert not (node_matches(agent, gpu | accept["nodeSelector"]))
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "state"]
    assert options.journal.startswith(mount["mountPath"])


def test_acceptance_in_json_with_an_image_of_its_own(render: Render) -> None:
    image = {"repository": "torch-with-perseus", "tag": "1"}
    objects = render({"acceptance": {"enabled": True, "format": "json", "image": image}})
    [container] = objects[ACCEPT]["spec"]["containers"]
    options = accept_options(container["args"], environment(container))
    assert (options.json, options.markdown) == ("-", "")
    assert container["image"] == "torch-with-perseus:1"


def test_simulated_gpus_need_no_gpu_node_and_change_little_of_the_agent(render: Render) -> None:
    objects = render({"simulatedGpus": {"enabled": True, "count": 4}, "agent": {"runtimeClassName": "nvidia"}})
    agent = pod(objects, AGENT)
    production = pod(render({"agent": {"runtimeClassName": "nvidia"}}), AGENT)
    assert node_matches(agent, {})
    assert "runtimeClassName" not in agent
    assert production["runtimeClassName"] == "nvidia"
    main, real = agent["containers"][0], production["containers"][0]
    assert main["args"] == real["args"]
    assert main["securityContext"] == real["securityContext"]
    assert agent_settings(main["args"], environment(main)).devices == "nvml"
    assert not any(name.startswith("NVIDIA") for name in environment(main))
    [folder] = [m["mountPath"] for m in main["volumeMounts"] if m["name"] == "simulated-gpus"]
    assert environment(main)["LD_LIBRARY_PATH"] == folder
    assert environment(main)[ENV_STATE] == f"{folder}/{STATE}"

    simulator = pod(objects, SIMULATOR)
    assert node_matches(simulator, {})
    container = simulator["containers"][0]
    assert {"--count=4", f"--gpus={folder}"} <= set(container["args"])
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in simulator["volumes"] if "hostPath" in volume}
    assert hosts["gpus"] == folder  # the same directory as the agent's: the kubelet mounts it into pods from there
    assert not simulator["automountServiceAccountToken"]
    assert objects["NetworkPolicy", "perseus-gpu-sim"]["spec"]["egress"] == []


def test_simulated_gpus_as_dynamic_resources_may_write_slices_and_read_claims(render: Render) -> None:
    values = {"simulatedGpus": {"enabled": True, "offeredAs": "DynamicResources"}}
    objects = render(values)
    simulator = pod(objects, SIMULATOR)
    assert simulator["automountServiceAccountToken"]
    account = objects["ServiceAccount", simulator["serviceAccountName"]]["metadata"]
    [role] = [body for (kind, name), body in objects.items() if kind == "ClusterRole" and name.endswith("-gpu-sim")]
    assert {(*rule["resources"], *rule["verbs"]) for rule in role["rules"]} == {
        ("resourceslices", "get", "create", "update"),
        ("resourceclaims", "get"),
    }
    [binding] = [body for (kind, name), body in objects.items() if kind == "ClusterRoleBinding" and "gpu-sim" in name]
    [subject] = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert objects["DeviceClass", DRIVER]["spec"]["extendedResourceName"] == "nvidia.com/gpu"
    assert objects["NetworkPolicy", "perseus-gpu-sim"]["spec"]["egress"] == [{}], "it speaks to the API server"
    hosts = {v["hostPath"]["path"]: v["hostPath"]["type"] for v in simulator["volumes"] if "hostPath" in v}
    assert hosts == {
        "/run/perseus-simulated-gpus": "DirectoryOrCreate",
        "/var/lib/kubelet/plugins_registry": "Directory",
        f"/var/lib/kubelet/plugins/{DRIVER}": "DirectoryOrCreate",
        "/var/run/cdi": "DirectoryOrCreate",
    }
    mounted = {mount["mountPath"] for mount in simulator["containers"][0]["volumeMounts"]}
    assert set(hosts) <= mounted
    given = {"--registry=/var/lib/kubelet/plugins_registry", f"--driver=/var/lib/kubelet/plugins/{DRIVER}"}
    assert given <= set(simulator["containers"][0]["args"])
    openshift = render({**values, "platform": {"openshift": True}})
    assert pod(openshift, SIMULATOR)["serviceAccountName"] == pod(openshift, AGENT)["serviceAccountName"]
    assert ("DaemonSet", "perseus-gpu-sim") not in render()


def test_without_agents_none_of_their_objects_is_rendered(render: Render) -> None:
    values = {"agent": {"enabled": False}, "metrics": {"serviceMonitor": {"enabled": True}}}
    objects = render(values)
    assert AGENT not in objects
    assert ("NetworkPolicy", "perseus-agent") not in objects
    assert not [key for key in objects if key[0] in ("Service", "ServiceMonitor") and "agent" in key[1]]


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


def test_generated_certificates_have_one_authority_and_the_right_names(render: Render) -> None:
    from base64 import b64decode

    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    objects = render()
    secrets = {name: objects["Secret", f"perseus-{name}-tls"]["data"] for name in ("operator", "agent")}
    authority = x509.load_pem_x509_certificate(b64decode(secrets["operator"]["ca.crt"]))
    for name, data in secrets.items():
        assert data["ca.crt"] == secrets["operator"]["ca.crt"]
        assert set(data) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is not stored"
        certificate = x509.load_pem_x509_certificate(b64decode(data["tls.crt"]))
        certificate.verify_directly_issued_by(authority)
        assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 366, "months, not years"
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"perseus-{name}"]
        usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        assert usages >= {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_certificates_by_cert_manager(render: Render) -> None:
    own = render({"tls": {"mode": "certManager"}})
    assert {name for kind, name in own if kind == "Issuer"} == {"perseus-bootstrap", "perseus-ca"}
    assert not {name for kind, name in own if kind == "Secret"}
    agent = own["Certificate", "perseus-agent-tls"]["spec"]
    assert agent["dnsNames"] == ["perseus-agent"]
    assert agent["usages"] == ["server auth", "client auth"]
    assert agent["issuerRef"]["name"] == "perseus-ca"
    issuer = {"name": "corporate", "kind": "Issuer"}
    objects = render({"tls": {"mode": "certManager", "certManager": {"issuerRef": issuer}}})
    assert not {name for kind, name in objects if kind == "Issuer"}
    assert objects["Certificate", "perseus-operator-tls"]["spec"]["issuerRef"] == issuer


@pytest.mark.parametrize("issuer", [{}, {"name": "corporate"}, {"name": "corporate", "kind": "A", "group": "b.c"}])
def test_each_agent_has_a_key_of_its_own_by_the_csi_driver(render: Render, issuer: dict[str, str]) -> None:
    values = {"tls": {"mode": "certManager", "certManager": {"csiDriver": True, "issuerRef": issuer}}}
    objects = render(values)
    assert ("Certificate", "perseus-agent-tls") not in objects
    assert ("Certificate", "perseus-operator-tls") in objects
    [volume] = [volume for volume in pod(objects, AGENT)["volumes"] if volume["name"] == "tls"]
    assert volume.keys() == {"name", "csi"}
    given = {key.rpartition("/")[2]: value for key, value in volume["csi"]["volumeAttributes"].items()}
    assert given["dns-names"] == "perseus-agent"
    assert set(given["key-usages"].split(",")) == {"server auth", "client auth"}, "an agent refuses without it"
    wanted = {"name": "perseus-ca", "kind": "Issuer", "group": "cert-manager.io", **issuer}
    assert {key: given[f"issuer-{key}"] for key in wanted} == wanted
    values["tls"]["mode"] = "generated"
    [shared] = [volume for volume in pod(render(values), AGENT)["volumes"] if volume["name"] == "tls"]
    assert "secret" in shared


def test_an_issuer_that_signs_for_every_namespace_must_be_accepted(render: Render) -> None:
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    with pytest.raises(RuntimeError, match="for everyone who may create Certificates anywhere"):
        render({"tls": {"mode": "certManager", "certManager": {"issuerRef": issuer}}})
    accepted = {"issuerRef": issuer, "allowClusterIssuer": True}
    objects = render({"tls": {"mode": "certManager", "certManager": accepted}})
    assert objects["Certificate", "perseus-operator-tls"]["spec"]["issuerRef"] == issuer


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


# ------------------------------------------------------------------------------------------------------ platforms


def test_critical_pods_have_the_quota_that_gke_asks_for(render: Render) -> None:
    together = render()
    quota = together["ResourceQuota", "perseus-critical-pods"]["spec"]
    (expression,) = quota["scopeSelector"]["matchExpressions"]
    assert expression["values"] == ["system-cluster-critical", "system-node-critical"]
    apart = render({"agent": {"namespaceOverride": "gpu-agents"}})
    assert ("ResourceQuota", "gpu-agents/perseus-critical-pods") in apart
    ordinary = {"operator": {"priorityClassName": "batch"}, "agent": {"priorityClassName": ""}}
    assert "ResourceQuota" not in kinds(render(ordinary)), "a class of your own needs none"
    assert "ResourceQuota" not in kinds(render({"platform": {"priorityQuota": False}}))


@pytest.mark.parametrize("said", [True, False])
def test_openshift_is_told_or_found(render: Render, said: bool) -> None:
    everything = {"simulatedGpus": {"enabled": True}, "acceptance": {"enabled": True}}
    objects = render({"platform": {"openshift": said}} | everything)
    context = pod(objects, OPERATOR)["securityContext"]
    assert ("runAsUser" in context, "fsGroup" in context) == (not said, not said)
    assert context["runAsNonRoot"], "whoever the user is"
    constraints = [body for (kind, _), body in objects.items() if kind == "SecurityContextConstraints"]
    accounts = {each.get("serviceAccountName") for each in pods(objects) if each.get("hostPID")}
    assert (len(constraints), accounts) == ((1, {"perseus-agent"}) if said else (0, {None}))
    if not said:
        return
    agent, allowed = pod(objects, AGENT), constraints[0]
    used = {kind for volume in agent["volumes"] for kind in volume if kind != "name"}
    assert used <= set(allowed["volumes"])
    assert container(objects, AGENT)["securityContext"]["capabilities"]["add"] == allowed["allowedCapabilities"]
    assert allowed["allowHostPID"]
    assert not allowed["allowPrivilegedContainer"]
    role = objects["ClusterRole", allowed["metadata"]["name"]]
    assert role["rules"][0]["resourceNames"] == [allowed["metadata"]["name"]]


def test_selinux_options_are_the_platforms_or_the_administrators(render: Render) -> None:
    everything = {"simulatedGpus": {"enabled": True}, "acceptance": {"enabled": True}}
    flag = "--socket-selinux-label="

    def options(values: dict[str, Any]) -> tuple[Any, list[Any], list[str]]:
        """Of the operator; of those that use directories of the node; and labels of the socket."""
        objects = render(values | everything)
        on_nodes = [each for each in pods(objects) if any("hostPath" in volume for volume in each.get("volumes", ()))]
        operator, *own = (each["securityContext"].get("seLinuxOptions") for each in (pod(objects, OPERATOR), *on_nodes))
        return operator, own, [each for each in container(objects, AGENT)["args"] if each.startswith(flag)]

    openshift, three = {"platform": {"openshift": True}}, 3
    assert options({}) == (None, [None] * three, [])
    usual = f"{flag}system_u:object_r:container_file_t:s0"
    assert options(openshift) == (None, [{"type": "spc_t"}] * three, [usual]), "a label that training pods may use"
    own, other = {"type": "perseus_t", "level": "s0"}, {"type": "confined_t"}
    said = {"agent": {"seLinuxOptions": own}, "operator": {"seLinuxOptions": other}}
    assert options(said | openshift) == (other, [own] * three, [usual])
    assert options({"agent": {"settings": {"socketSelinuxLabel": "a:b:c:s0"}}} | openshift)[2] == [], "it is set"


def test_the_operator_may_have_a_user_namespace_of_its_own(render: Render) -> None:
    assert "hostUsers" not in pod(render(), OPERATOR)
    objects = render({"operator": {"hostUsers": False}})
    assert pod(objects, OPERATOR)["hostUsers"] is False
    assert "hostUsers" not in pod(objects, AGENT), "its capability counts in the node's user namespace alone"


def test_additions_of_the_administrator(render: Render) -> None:
    more = {
        "extraArgs": ["--log-level=DEBUG"],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "image": {"pullPolicy": "Always"},
    }
    budget = {"podDisruptionBudget": {"enabled": True}}
    objects = render(
        {"operator": more | budget, "agent": more, "metrics": {"dashboards": {"enabled": True, "namespace": "grafana"}}}
    )
    for key in (OPERATOR, AGENT):
        made = container(objects, key)
        assert made["args"][-1] == "--log-level=DEBUG"
        assert made["imagePullPolicy"] == "Always"
        assert {"name": "ca", "mountPath": "/etc/ca"} in made["volumeMounts"]
        assert more["extraVolumes"][0] in pod(objects, key)["volumes"]
    selected = objects["PodDisruptionBudget", "perseus-operator"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= objects[OPERATOR]["spec"]["template"]["metadata"]["labels"].items()
    assert all(name.startswith("grafana/") for kind, name in objects if kind == "ConfigMap")


def test_the_catalogue_lists_every_definition(render: Render) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    listed = {crd["name"] for crd in yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])}
    assert listed == {name for kind, name in render() if kind == "CustomResourceDefinition"}


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

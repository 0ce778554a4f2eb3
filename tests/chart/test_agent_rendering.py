"""What the chart renders of agents: what they may do, where they run, what simulates their GPUs, what tests them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chart.manifests import (
    AGENT,
    GPU_LABELS,
    OPERATOR,
    SIMULATOR,
    Render,
    container,
    environment,
    named,
    pod,
)

from perseus_agent.settings import parse_settings as agent_settings
from perseus_bench.options import parse_options as accept_options
from perseus_core import keys
from perseus_operator.controller.settings import parse_settings as operator_settings
from perseus_sim.gpus.dynamic_resources import DRIVER
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.shim_gpu import STATE

NODES: dict[str, tuple[bool, dict[str, str]]] = {
    # cloudpilot-ai/karpenter-provider-gcp issues 319 and 449: what GKE's own pools have, its plugin and driver need
    "GKE, its own plugin": (
        True,
        {
            "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
            "cloud.google.com/gke-gpu": "true",
            "cloud.google.com/gke-gpu-driver-version": "default",
            "cloud.google.com/gke-nodepool": "gpus",
            "node.kubernetes.io/instance-type": "a3-highgpu-8g",
        },
    ),
    # GoogleCloudPlatform/container-engine-accelerators, gpu-reset-tool: before it resets a GPU
    "GKE, a GPU is reset": (
        False,
        {
            "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
            "cloud.google.com/gke-gpu-driver-version": "reset",
            "gke-no-default-nvidia-gpu-device-plugin": "true",
        },
    ),
    "GKE, a TPU": (False, {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice"}),
    "GKE, no GPU": (False, {"cloud.google.com/gke-nodepool": "default-pool"}),
    # kubectl describe node of a pool of Standard_NC6s_v3, and kubernetes/autoscaler issue 2987
    "AKS, its GPU image": (
        True,
        {
            "accelerator": "nvidia",
            "kubernetes.azure.com/accelerator": "nvidia",
            "kubernetes.azure.com/agentpool": "gpunp",
            "kubernetes.azure.com/mode": "user",
            "node.kubernetes.io/instance-type": "Standard_NC6s_v3",
        },
    ),
    # Documentation of EKS, ml-workload-placement, and aws/karpenter-provider-aws pull request 1857
    "EKS, Karpenter": (
        True,
        {
            "karpenter.k8s.aws/instance-gpu-count": "8",
            "karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia",
            "karpenter.k8s.aws/instance-gpu-name": "h100",
            "node.kubernetes.io/instance-type": "p5.48xlarge",
        },
    ),
    "EKS, Karpenter, AMD": (False, {"karpenter.k8s.aws/instance-gpu-manufacturer": "amd"}),
    "EKS, Auto Mode": (
        True,
        {"eks.amazonaws.com/instance-gpu-manufacturer": "nvidia", "eks.amazonaws.com/instance-gpu-name": "l4"},
    ),
    # docs/install.md says so
    "EKS, a node group": (
        False,
        {"eks.amazonaws.com/nodegroup": "gpus", "node.kubernetes.io/instance-type": "p4d.24xlarge"},
    ),
    # Its NFD has the class in no label: oc describe node in the guides of its GPU Operator
    "OpenShift, NFD": (
        True,
        {"feature.node.kubernetes.io/pci-10de.present": "true", "node-role.kubernetes.io/worker": ""},
    ),
    "NFD by default": (True, {"feature.node.kubernetes.io/pci-0302_10de.present": "true"}),
    "NFD by default, a card of Mellanox": (False, {"feature.node.kubernetes.io/pci-0207_15b3.present": "true"}),
    "GPU Operator": (
        True,
        {
            "feature.node.kubernetes.io/pci-10de.present": "true",
            "nvidia.com/gpu.deploy.device-plugin": "true",
            "nvidia.com/gpu.deploy.driver": "true",
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "nvidia.com/gpu-driver-upgrade-state": "upgrade-done",
        },
    ),
    "GPU Operator, its driver is replaced": (
        False,
        {"nvidia.com/gpu.present": "true", "nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"},
    ),
}


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


def test_the_agent_has_time_to_reset_clocks(render: Render) -> None:
    grace = pod(render(), AGENT)["terminationGracePeriodSeconds"]
    assert grace > agent_settings([], {"PERSEUS_AGENT_INSECURE": "true"}).drain_timeout_s


def node_matches(agent: Any, labels: dict[str, str]) -> bool:
    """Return whether the scheduler would accept a node: terms are ORed, and expressions and the node selector ANDed."""
    holds = {
        "In": lambda e: labels.get(e["key"]) in e["values"],
        "NotIn": lambda e: labels.get(e["key"]) not in e["values"],
        "Exists": lambda e: e["key"] in labels,
        "DoesNotExist": lambda e: e["key"] not in labels,
    }
    affinity = agent.get("affinity")
    if affinity:
        required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        terms = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
        if not any(all(holds[e["operator"]](e) for e in term) for term in terms):
            return False
    return all(labels.get(key) == value for key, value in agent.get("nodeSelector", {}).items())


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


@pytest.mark.parametrize("node", NODES)
def test_on_which_nodes_of_which_platform_an_agent_runs(render: Render, node: str) -> None:
    runs, labels = NODES[node]
    assert node_matches(pod(render(), AGENT), labels) is runs


RELEASED = [
    {keys.LABEL_RELEASE_GPUS: "true"},
    {"nvidia.com/gpu-driver-upgrade-state": "pod-deletion-required"},
    {"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"},
    {"nvidia.com/gpu.deploy.device-plugin": "false"},  # NVSentinel before it resets a GPU
    {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"},
    {"cloud.google.com/gke-gpu-driver-version": "reset"},  # gpu-reset-tool of container-engine-accelerators
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

"""What the chart renders for a platform, or as its administrator adds it: GKE, OpenShift, SELinux, user namespaces."""

from __future__ import annotations

from typing import Any

import pytest
from tests.chart.manifests import AGENT, OPERATOR, Render, container, kinds, pod, pods


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

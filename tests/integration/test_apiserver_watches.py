"""Selections, watches and the built-in kinds of the API server, through the Python client and its dynamic client.

Asserts only what a real kube-apiserver does: run it against one with PERSEUS_TEST_KUBECONFIG.
"""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client, dynamic, watch
from tests.integration.widgets import GROUP, VERSION, Widgets, pod, refused

# ----------------------------------------------------------------------------------------- selection and watches


def test_label_selectors(core: Any, namespace: str) -> None:
    for name, labels in (("a", {"tier": "x", "job": "1"}), ("b", {"tier": "y"}), ("c", {})):
        core.create_namespaced_pod(namespace, pod(name, labels=labels))

    def names(selector: str) -> list[str]:
        return [item.metadata.name for item in core.list_namespaced_pod(namespace, label_selector=selector).items]

    assert names("tier=x") == ["a"]
    assert names("tier in (x,y)") == ["a", "b"]
    assert names("tier notin (x),tier") == ["b"]
    assert names("tier!=x") == ["b", "c"]
    assert names("!tier") == ["c"]
    assert names("tier,job=1") == ["a"]


def test_field_selectors(core: Any, namespace: str) -> None:
    core.create_namespaced_pod(namespace, pod("a", node="n1"))
    core.create_namespaced_pod(namespace, pod("b"))
    found = core.list_namespaced_pod(namespace, field_selector="spec.nodeName=n1").items
    assert [item.metadata.name for item in found] == ["a"]
    found = core.list_namespaced_pod(namespace, field_selector="metadata.name!=a,status.phase=Pending").items
    assert [item.metadata.name for item in found] == ["b"]
    assert refused(lambda: core.list_namespaced_pod(namespace, field_selector="spec.image=x"))[0] == 400
    core.delete_namespaced_pod("a", namespace, grace_period_seconds=0)


def test_a_watch_continues_from_a_list(core: Any, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "before"}})
    listed = core.list_namespaced_config_map(namespace)
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "after"}, "data": {"n": "1"}})
    core.patch_namespaced_config_map("after", namespace, {"data": {"n": "2"}})
    core.delete_namespaced_config_map("after", namespace)
    events = watch.Watch().stream(
        core.list_namespaced_config_map,
        namespace,
        resource_version=listed.metadata.resource_version,
        field_selector="metadata.name=after",
        timeout_seconds=1,
    )
    seen = [(event["type"], event["object"].data["n"]) for event in events]
    assert seen == [("ADDED", "1"), ("MODIFIED", "2"), ("DELETED", "2")]


def test_revisions_grow_along_a_watch(core: Any, namespace: str) -> None:
    for index in range(3):
        core.create_namespaced_config_map(namespace, {"metadata": {"name": f"c{index}"}})
    stream = watch.Watch().stream(core.list_namespaced_config_map, namespace, timeout_seconds=1)
    names = [event["object"].metadata.name for event in stream]
    assert {"c0", "c1", "c2"} <= set(names)


def test_leaving_a_selection_is_seen_as_a_deletion(core: Any, namespace: str) -> None:
    start = core.list_namespaced_pod(namespace).metadata.resource_version
    core.create_namespaced_pod(namespace, pod("p"))
    core.patch_namespaced_pod("p", namespace, {"metadata": {"labels": {"job": "j"}}})
    core.patch_namespaced_pod("p", namespace, {"metadata": {"labels": {"job": None}}})
    events = watch.Watch().stream(
        core.list_namespaced_pod, namespace, label_selector="job=j", resource_version=start, timeout_seconds=1
    )
    assert [event["type"] for event in events] == ["ADDED", "DELETED"]


def test_a_watch_with_initial_events_marks_their_end(api: Any, core: Any, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "a"}})
    response = api.call_api(
        *api.param_serialize(
            "GET",
            f"/api/v1/namespaces/{namespace}/configmaps",
            query_params=[
                ("watch", "true"),
                ("sendInitialEvents", "true"),
                ("resourceVersionMatch", "NotOlderThan"),
                ("allowWatchBookmarks", "true"),
                ("fieldSelector", "metadata.name=a"),
                ("timeoutSeconds", "1"),
            ],
            auth_settings=["BearerToken"],
        )
    )
    lines = [json.loads(line) for line in response.read().splitlines()]
    assert [line["type"] for line in lines[:2]] == ["ADDED", "BOOKMARK"]
    assert lines[1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


# ----------------------------------------------------------------------------------------------- kinds and discovery


def test_events_are_the_same_in_both_of_their_groups(api: Any, core: Any, namespace: str) -> None:
    body = {
        "metadata": {"name": "e1"},
        "regarding": {"kind": "Pod", "name": "p", "namespace": namespace},
        "reason": "PlanApplied",
        "note": "point 3 in force",
        "type": "Normal",
        "action": "Select",
        "eventTime": "2026-01-01T00:00:00.000001Z",  # the client would drop zeros, and a real server insists on them
        "reportingController": "perseus.energy/operator",
        "reportingInstance": "operator-0",
    }
    client.EventsV1Api(api).create_namespaced_event(namespace, body)
    found = core.list_namespaced_event(namespace, field_selector="involvedObject.name=p,reason=PlanApplied").items
    assert [(event.message, event.reporting_component) for event in found] == [
        ("point 3 in force", "perseus.energy/operator")
    ]


def test_secrets_take_text_and_give_base64(core: Any, namespace: str) -> None:
    core.create_namespaced_secret(namespace, {"metadata": {"name": "s"}, "stringData": {"token": "abc"}})
    assert core.read_namespaced_secret("s", namespace).data == {"token": "YWJj"}


def test_leases_are_taken_over_by_compare_and_swap(api: Any, namespace: str) -> None:
    leases = client.CoordinationV1Api(api)
    body = {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15}}
    first = leases.create_namespaced_lease(namespace, body)
    second = leases.read_namespaced_lease("leader", namespace)
    second.spec.holder_identity = "b"
    leases.replace_namespaced_lease("leader", namespace, second)
    first.spec.holder_identity = "c"
    assert refused(lambda: leases.replace_namespaced_lease("leader", namespace, first))[0] == 409


def test_a_pod_needs_containers(core: Any, namespace: str) -> None:
    code, status = refused(lambda: core.create_namespaced_pod(namespace, {**pod("p"), "spec": {"containers": []}}))
    assert (code, status["reason"]) == (422, "Invalid")
    assert "spec.containers" in status["message"]


def test_the_dynamic_client_finds_a_custom_resource_by_kind(api: Any, widgets: Widgets) -> None:
    kinds = dynamic.DynamicClient(api)
    resource = kinds.resources.get(api_version=f"{GROUP}/{VERSION}", kind="Widget")
    assert resource.namespaced
    widgets.create()
    assert [item.metadata.name for item in resource.get(namespace=widgets.namespace).items] == ["one"]
    patched = resource.status.patch(
        body={"status": {"conditions": [{"type": "Ready", "status": "True"}]}},
        name="one",
        namespace=widgets.namespace,
        content_type="application/merge-patch+json",
    )
    assert patched.status.conditions[0].status == "True"


def test_a_timeout_that_is_no_whole_number_is_refused(api: Any) -> None:
    asked = {"resource_path": "/api/v1/pods", "query_params": [("watch", "true"), ("timeoutSeconds", "1.0")]}
    call = api.param_serialize(method="GET", auth_settings=["BearerToken"], **asked)
    answer = api.call_api(*call)
    answer.read()
    assert answer.status == 400
    assert 'parsing "1.0": invalid syntax' in json.loads(answer.data)["message"]

"""Objects on the API server as its clients see them, one at a time, through the Python client and its dynamic client.

Asserts only what a real kube-apiserver does: run it against one with PERSEUS_TEST_KUBECONFIG.
"""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes import client, dynamic
from kubernetes.client.exceptions import ApiException
from tests.integration.widgets import CRD, GROUP, PLURAL, VERSION, Widgets, absent, pod, refused
from tests.waiting import eventually

# -------------------------------------------------------------------------------------------- identity and concurrency


def test_a_new_object_gets_identity_and_generation(widgets: Widgets) -> None:
    metadata = widgets.create()["metadata"]
    assert metadata["uid"]
    assert metadata["generation"] == 1
    assert metadata["namespace"] == widgets.namespace
    created = datetime.fromisoformat(metadata["creationTimestamp"])
    assert abs((datetime.now(UTC) - created).total_seconds()) < 60
    assert widgets.get()["metadata"]["resourceVersion"] == metadata["resourceVersion"]


def test_a_list_of_metadata_is_null_where_there_is_nothing(widgets: Widgets) -> None:
    """Unlike a list of whole objects, which is empty."""
    only = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    listed = lambda **options: widgets.custom.list_namespaced_custom_object(  # noqa: E731
        GROUP, VERSION, widgets.namespace, PLURAL, **options
    )
    assert listed()["items"] == []
    assert listed(_headers={"Accept": only})["items"] is None
    uid = widgets.create()["metadata"]["uid"]
    [item] = listed(_headers={"Accept": only})["items"]
    assert (item["metadata"]["uid"], "spec" in item) == (uid, False)


def test_the_same_name_again_is_a_new_object_with_another_uid(widgets: Widgets) -> None:
    first = widgets.create()
    widgets.delete()
    assert widgets.create()["metadata"]["uid"] != first["metadata"]["uid"]


def test_creating_twice_is_refused(widgets: Widgets) -> None:
    widgets.create()
    code, status = refused(widgets.create)
    assert (code, status["reason"]) == (409, "AlreadyExists")
    assert status["message"] == f'{PLURAL}.{GROUP} "one" already exists'


def test_a_missing_object_is_named_in_the_error(widgets: Widgets) -> None:
    code, status = refused(widgets.get)
    assert (code, status["kind"], status["reason"], status["code"]) == (404, "Status", "NotFound", 404)
    assert status["details"]["name"] == "one"
    assert status["message"] == f'{PLURAL}.{GROUP} "one" not found'


def test_a_missing_namespace_is_named_in_the_error(api: Any, definition: dict[str, Any]) -> None:
    code, status = refused(lambda: Widgets(api, "nowhere").create())
    assert (code, status["message"]) == (404, 'namespaces "nowhere" not found')


def test_a_stale_write_is_refused(widgets: Widgets) -> None:
    stale = widgets.create()
    widgets.patch({"spec": {"size": 5}})
    code, status = refused(lambda: widgets.replace({**stale, "spec": {"size": 6}}))
    assert (code, status["reason"]) == (409, "Conflict")
    assert "the object has been modified" in status["message"]
    stale_patch = {"metadata": {"resourceVersion": stale["metadata"]["resourceVersion"]}, "spec": {"size": 6}}
    assert refused(lambda: widgets.patch(stale_patch))[0] == 409
    assert widgets.get()["spec"]["size"] == 5


def test_concurrent_writers_lose_no_update(core: Any, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "counter"}, "data": {"n": "0"}})

    def add(times: int) -> None:
        while times:
            found = core.read_namespaced_config_map("counter", namespace)
            found.data["n"] = str(int(found.data["n"]) + 1)
            try:
                core.replace_namespaced_config_map("counter", namespace, found)
                times -= 1
            except ApiException as error:
                if error.status != 409:
                    raise

    threads = [threading.Thread(target=add, args=(5,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert core.read_namespaced_config_map("counter", namespace).data == {"n": "20"}


def test_names_are_generated_and_checked(core: Any, namespace: str) -> None:
    made = core.create_namespaced_config_map(namespace, {"metadata": {"generateName": "plan-"}})
    assert made.metadata.name.startswith("plan-")
    assert len(made.metadata.name) > len("plan-")
    code, status = refused(lambda: core.create_namespaced_config_map(namespace, {"metadata": {"name": "Not_A_Name"}}))
    assert (code, status["reason"]) == (422, "Invalid")
    assert status["details"]["causes"][0]["field"] == "metadata.name"


def test_dry_run_changes_nothing(core: Any, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "a"}}, dry_run="All")
    assert absent(lambda: core.read_namespaced_config_map("a", namespace))


# ---------------------------------------------------------------------------------------- spec, status and generation


def test_generation_counts_changes_of_the_spec_alone(widgets: Widgets) -> None:
    widgets.create()
    assert widgets.patch({"metadata": {"labels": {"a": "b"}}})["metadata"]["generation"] == 1
    assert widgets.patch({"spec": {"size": 9}})["metadata"]["generation"] == 2
    seen = widgets.get()
    seen["status"] = {"observedGeneration": 2}
    assert widgets.replace_status(seen)["metadata"]["generation"] == 2


def test_a_write_that_changes_nothing_makes_no_revision(widgets: Widgets) -> None:
    before = widgets.create()["metadata"]["resourceVersion"]
    assert widgets.patch({"spec": {"size": 4}})["metadata"]["resourceVersion"] == before


def test_status_and_spec_are_written_through_their_own_doors(widgets: Widgets) -> None:
    made = widgets.create()
    assert "status" not in widgets.patch({"status": {"observedGeneration": 7}})
    made = widgets.get()
    made["spec"]["size"] = 9
    made["status"] = {"observedGeneration": 1}
    after = widgets.replace_status(made)
    assert after["spec"]["size"] == 4
    assert after["status"] == {"observedGeneration": 1}
    assert widgets.patch({"spec": {"size": 5}})["status"] == {"observedGeneration": 1}


# ------------------------------------------------------------------------------------------------------ the schema


def test_defaults_are_filled_in_and_unknown_fields_dropped(widgets: Widgets) -> None:
    made = widgets.create(size=4, unknown=1, power={}, free={"any": {"thing": [1]}}, limit="3%")
    assert made["spec"] == {
        "size": 4,
        "colour": "red",
        "power": {"capW": 400},
        "free": {"any": {"thing": [1]}},
        "limit": "3%",
    }


@pytest.mark.parametrize(
    ("spec", "field", "rule"),
    [
        ({"size": 0}, "spec.size", "should be greater than or equal to 1"),
        ({"size": 65}, "spec.size", "should be less than or equal to 64"),
        ({"size": "four"}, "spec.size", "must be of type integer"),
        ({"colour": "red"}, "spec.size", "Required value"),
        ({"size": 1, "colour": "green"}, "spec.colour", 'supported values: "red", "blue"'),
        ({"size": 1, "slowdown": "fast"}, "spec.slowdown", "should match '^[0-9]+%$'"),
        ({"size": 1, "tags": ["a", "b", "c"]}, "spec.tags", "must have at most 2 items"),
        ({"size": 1, "tags": [1]}, "spec.tags[0]", "must be of type string"),
    ],
)
def test_a_broken_rule_is_named_with_its_field(widgets: Widgets, spec: dict[str, Any], field: str, rule: str) -> None:
    code, status = refused(lambda: widgets.create(**spec))
    assert (code, status["reason"], status["details"]["kind"]) == (422, "Invalid", "Widget")
    assert [cause["field"] for cause in status["details"]["causes"]] == [field]
    assert rule in status["details"]["causes"][0]["message"]
    assert absent(widgets.get)


def test_strict_validation_names_unknown_fields(widgets: Widgets) -> None:
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Widget",
        "metadata": {"name": "one"},
        "spec": {"size": 1, "sise": 2},
    }
    code, status = refused(
        lambda: widgets.custom.create_namespaced_custom_object(*widgets.place, body, field_validation="Strict")
    )
    assert (code, status["reason"]) == (400, "BadRequest")
    assert 'unknown field "spec.sise"' in status["message"]


def test_list_map_keys_must_be_unique(widgets: Widgets) -> None:
    made = widgets.create()
    made["status"] = {"conditions": [{"type": "Ready", "status": "True"}] * 2}
    code, status = refused(lambda: widgets.replace_status(made))
    assert code == 422
    assert "Duplicate value" in status["message"]


# ------------------------------------------------------------------------------------------------------------ patches


def test_merge_patch_removes_with_null(core: Any, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "a"}, "data": {"x": "1", "y": "2"}})
    patched = core.patch_namespaced_config_map(
        "a", namespace, {"data": {"x": None, "z": "3"}}, _content_type="application/merge-patch+json"
    )
    assert patched.data == {"y": "2", "z": "3"}


def test_json_patch_is_applied_whole_or_not_at_all(widgets: Widgets) -> None:
    widgets.create()
    assert widgets.patch([{"op": "replace", "path": "/spec/size", "value": 8}])["spec"]["size"] == 8
    code, _ = refused(
        lambda: widgets.patch(
            [{"op": "replace", "path": "/spec/size", "value": 9}, {"op": "remove", "path": "/spec/nothing"}]
        )
    )
    assert code == 422
    assert widgets.get()["spec"]["size"] == 8


def test_strategic_patch_merges_lists_by_their_key(core: Any, namespace: str) -> None:
    core.create_namespaced_pod(namespace, pod("p"))
    ready = {"type": "Ready", "status": "True"}
    for condition in (ready, {"type": "Other", "status": "False"}):
        core.patch_namespaced_pod_status("p", namespace, {"status": {"conditions": [condition]}})
    patched = core.patch_namespaced_pod_status(
        "p", namespace, {"status": {"conditions": [{"type": "Other", "status": "True"}]}}
    )
    assert {c.type: c.status for c in patched.status.conditions} == {"Ready": "True", "Other": "True"}


def test_apply_creates_then_removes_what_is_no_longer_declared(api: Any, core: Any, namespace: str) -> None:
    config_maps = dynamic.DynamicClient(api).resources.get(api_version="v1", kind="ConfigMap")

    def apply(data: dict[str, str]) -> Any:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}
        return config_maps.server_side_apply(body, namespace=namespace, field_manager="test")

    apply({"x": "1", "y": "2"})
    core.patch_namespaced_config_map("a", namespace, {"data": {"other": "3"}})
    assert apply({"x": "1"}).data.to_dict() == {"x": "1", "other": "3"}


# ----------------------------------------------------------------------------------------------------- deletion


def test_finalizers_hold_a_deleted_object(widgets: Widgets) -> None:
    widgets.create(metadata={"finalizers": ["tests.perseus.energy/hold"]})
    widgets.delete()
    held = widgets.get()
    assert held["metadata"]["deletionTimestamp"]
    held["metadata"]["finalizers"].append("tests.perseus.energy/late")
    assert refused(lambda: widgets.replace(held))[0] == 422
    widgets.patch({"metadata": {"finalizers": None}})
    assert absent(widgets.get)


def test_deleting_with_a_wrong_precondition_is_refused(widgets: Widgets) -> None:
    widgets.create()
    options = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="another"))
    assert refused(lambda: widgets.delete(body=options))[0] == 409
    assert widgets.get()


def owned_by(owner: dict[str, Any], name: str, *, blocking: bool = False) -> dict[str, Any]:
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": blocking,
    }
    return {"metadata": {"name": name, "ownerReferences": [reference]}, "data": {}}


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_owned_objects_go_with_their_owner(widgets: Widgets, core: Any, namespace: str, policy: str) -> None:
    owner = widgets.create()
    core.create_namespaced_config_map(namespace, owned_by(owner, "frontier", blocking=True))
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "bystander"}})
    widgets.delete(propagation_policy=policy)
    eventually(lambda: absent(lambda: core.read_namespaced_config_map("frontier", namespace)))
    eventually(lambda: absent(widgets.get))
    assert core.read_namespaced_config_map("bystander", namespace)


def test_orphans_stay_without_their_owner(widgets: Widgets, core: Any, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, owned_by(widgets.create(), "frontier"))
    widgets.delete(propagation_policy="Orphan")
    eventually(lambda: absent(widgets.get))
    eventually(lambda: not core.read_namespaced_config_map("frontier", namespace).metadata.owner_references)


def test_an_object_whose_owner_is_already_gone_is_collected(widgets: Widgets, core: Any, namespace: str) -> None:
    owner = widgets.create()
    widgets.delete()
    core.create_namespaced_config_map(namespace, owned_by(owner, "late"))
    eventually(lambda: absent(lambda: core.read_namespaced_config_map("late", namespace)))


def test_deleting_a_namespace_deletes_what_is_in_it(api: Any, widgets: Widgets) -> None:
    core = client.CoreV1Api(api)
    name = f"{widgets.namespace}-inner"
    core.create_namespace({"metadata": {"name": name}})
    inner = Widgets(api, name)
    inner.create(metadata={"finalizers": ["tests.perseus.energy/hold"]})
    for index in range(50):
        core.create_namespaced_config_map(name, {"metadata": {"name": f"c{index}"}})
    core.delete_namespace(name)
    assert core.read_namespace(name).status.phase == "Terminating"
    eventually(lambda: bool(inner.get()["metadata"].get("deletionTimestamp")))
    assert refused(lambda: inner.create("two"))[0] == 403
    inner.patch({"metadata": {"finalizers": None}})
    eventually(lambda: absent(lambda: core.read_namespace(name)))


def test_deleting_a_definition_deletes_its_objects(api: Any, namespace: str) -> None:
    other = json.loads(json.dumps(CRD).replace(PLURAL, "gadgets").replace("Widget", "Gadget").replace('"wg"', '"gg"'))
    extensions = client.ApiextensionsV1Api(api)
    extensions.create_custom_resource_definition(other)
    gadgets = client.CustomObjectsApi(api)
    place = (GROUP, VERSION, namespace, "gadgets")
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Gadget", "metadata": {"name": "one"}, "spec": {"size": 1}}
    eventually(lambda: not absent(lambda: gadgets.list_namespaced_custom_object(*place)))
    gadgets.create_namespaced_custom_object(*place, body)
    extensions.delete_custom_resource_definition(other["metadata"]["name"])
    eventually(lambda: absent(lambda: extensions.read_custom_resource_definition(other["metadata"]["name"])))
    eventually(lambda: absent(lambda: gadgets.list_namespaced_custom_object(*place)))


def test_a_definition_without_structural_schema_is_refused(api: Any) -> None:
    broken = json.loads(json.dumps(CRD).replace(PLURAL, "things").replace("Widget", "Thing").replace('"wg"', '"th"'))
    broken["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["size"].pop("type")
    code, status = refused(lambda: client.ApiextensionsV1Api(api).create_custom_resource_definition(broken))
    assert code == 422
    assert "openAPIV3Schema.properties[spec].properties[size].type" in status["message"]

"""Parts of the embedded API server that no client reaches easily: patches, tables, forgotten revisions, injected
faults.
"""

from __future__ import annotations

from typing import Any

import kmock
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_sim.apiserver import schema
from perseus_sim.apiserver.catalog import Catalog
from perseus_sim.apiserver.errors import AlreadyExists, BadRequest, Expired
from perseus_sim.apiserver.handler import ApiServer
from perseus_sim.apiserver.patches import merge_patch, strategic_patch
from perseus_sim.apiserver.selectors import field_selector, label_selector
from perseus_sim.apiserver.store import Store
from perseus_sim.apiserver.tables import table
from perseus_sim.apiserver.watches import REMEMBERED, Feed

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
documents = st.dictionaries(
    st.sampled_from("abc"), st.recursive(scalars, lambda inner: st.dictionaries(st.sampled_from("abc"), inner))
)


def pods() -> Any:
    return Catalog.with_builtins().find("", "v1", "pods")


# ------------------------------------------------------------------------------------------ patches


@given(documents, documents)
def test_a_merge_patch_applied_twice_changes_nothing_more(obj: dict[str, Any], patch: dict[str, Any]) -> None:
    once = merge_patch(obj, patch)
    assert merge_patch(once, patch) == once


@given(documents, documents)
def test_without_lists_a_strategic_patch_is_a_merge_patch(obj: dict[str, Any], patch: dict[str, Any]) -> None:
    assert strategic_patch(obj, patch) == merge_patch(obj, patch)


def test_strategic_directives() -> None:
    containers = [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]
    patched = strategic_patch(
        {"containers": containers, "finalizers": ["x"]},
        {
            "containers": [{"name": "a", "$patch": "delete"}, {"name": "b", "image": "2"}, {"name": "c"}],
            "$setElementOrder/containers": [{"name": "b"}, {"name": "c"}],
            "finalizers": ["y"],
            "$deleteFromPrimitiveList/finalizers": ["x"],
        },
    )
    assert patched["containers"] == [{"name": "b", "image": "2"}, {"name": "c"}]
    assert set(patched["finalizers"]) <= {"x", "y"}
    assert strategic_patch({"a": 1, "b": 2}, {"$retainKeys": ["a"]}) == {"a": 1}
    assert strategic_patch({"a": {"x": 1}}, {"a": {"$patch": "replace", "y": 2}}) == {"a": {"y": 2}}


# ------------------------------------------------------------------------------------------- schema

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "exclusiveMinimum": True, "minimum": 0},
                "either": {"type": "object", "x-kubernetes-preserve-unknown-fields": True,
                           "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
                "maybe": {"type": "string", "nullable": True, "default": "d"},
                "when": {"type": "string", "format": "date-time"},
                "by": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
        }
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"n": 0}, "spec.n"),
        ({"n": True}, "spec.n"),
        ({"either": {}}, "spec.either"),
        ({"either": {"a": 1, "b": 1}}, "spec.either"),
        ({"when": "yesterday"}, "spec.when"),
        ({"by": {"x": "1"}}, "spec.by.x"),
        ([], "spec"),
    ],
)
def test_rules_are_checked_and_named(spec: Any, field: str) -> None:
    assert [cause.field for cause in schema.broken_rules({"spec": spec}, SCHEMA)] == [field]


def test_null_keeps_its_meaning_only_where_it_is_allowed() -> None:
    assert schema.defaulted({"spec": {"maybe": None}}, SCHEMA) == {"spec": {"maybe": None}}
    assert schema.defaulted({"spec": {}}, SCHEMA) == {"spec": {"maybe": "d"}}
    assert schema.broken_rules({"spec": {"maybe": None, "n": 1, "either": {"b": 0}}}, SCHEMA) == []


FREE = {"x-kubernetes-preserve-unknown-fields": True}


@given(documents)
def test_pruning_keeps_what_it_knows_and_names_the_rest(spec: dict[str, Any]) -> None:
    known = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"a": FREE}}}}
    kept, dropped = schema.pruned({"kind": "X", "spec": spec}, known)
    assert kept == {"kind": "X", "spec": {"a": spec["a"]} if "a" in spec else {}}
    assert {path for path in dropped if path.count(".") == 1} == {f"spec.{key}" for key in spec if key != "a"}


# -------------------------------------------------------------------------------- selectors, tables


@pytest.mark.parametrize("text", ["a=b=c", "a in x", "=b", "a in (x", "()"])
def test_a_wrong_label_selector_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="label selector"):
        label_selector(text)


def test_fields_of_other_kinds_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"field label not supported: spec\.image"):
        field_selector("spec.image=x", pods())


def test_columns_follow_their_json_paths() -> None:
    resource = Catalog.with_builtins().find("", "v1", "nodes")
    node = {
        "metadata": {"name": "n", "creationTimestamp": "2020-01-01T00:00:00Z"},
        "status": {"conditions": [{"type": "Ready", "reason": "KubeletReady"}, {"type": "Other", "reason": "No"}]},
    }
    shown = table(resource, [node, {"metadata": {"name": "m"}}], {})
    name, status, age = shown["rows"][0]["cells"]
    assert (name, status) == ("n", "KubeletReady")
    assert age.endswith("d")
    assert shown["rows"][1]["cells"] == ["m", None, "<unknown>"]


# ----------------------------------------------------------------------------------- store, watches


def test_a_forgotten_or_future_revision_must_be_listed_again() -> None:
    feed = Feed()
    for revision in range(1, REMEMBERED + 3):
        feed.publish(revision, {}, None, deleted=False)
    with pytest.raises(Expired):
        feed.subscribe(1, REMEMBERED + 2)
    with pytest.raises(Expired):
        feed.subscribe(REMEMBERED + 9, REMEMBERED + 2)
    assert feed.subscribe(2, REMEMBERED + 2).qsize() == REMEMBERED


def test_a_refused_write_changes_nothing() -> None:
    store = Store()
    config_maps = store.catalog.find("", "v1", "configmaps")
    store.create(config_maps, "default", {"metadata": {"name": "a"}, "data": {"x": "1"}})
    revision = store.revision
    with pytest.raises(AlreadyExists):
        store.create(config_maps, "default", {"metadata": {"name": "a"}, "data": {"x": "2"}})
    assert store.revision == revision
    assert store.get(config_maps, "default", "a")["data"] == {"x": "1"}


def test_what_was_handed_out_stays_as_it_was() -> None:
    store = Store()
    config_maps = store.catalog.find("", "v1", "configmaps")
    first = store.create(config_maps, "default", {"metadata": {"name": "a"}, "data": {"x": "1"}})
    store.update(config_maps, "default", "a", lambda old: {**old, "data": {"x": "2"}})
    assert first["data"] == {"x": "1"}


async def test_a_declared_fault_wins_over_the_store() -> None:
    async with ApiServer() as server, kmock.Server(server) as running:
        async with running.client.get("/api/v1/nodes") as response:
            assert response.status == 200
        server["get /api/v1/nodes"] << 503
        async with running.client.get("/api/v1/nodes") as response:
            assert response.status == 503
        async with running.client.get("/api/v1/namespaces/default") as response:
            assert (await response.json())["kind"] == "Namespace"


async def test_a_protobuf_body_is_refused_politely() -> None:
    async with ApiServer() as server, kmock.Server(server) as running:
        headers = {"Content-Type": "application/vnd.kubernetes.protobuf"}
        async with running.client.post("/api/v1/namespaces", data=b"k8s\x00\xff", headers=headers) as response:
            assert response.status == 415
            assert (await response.json())["reason"] == "UnsupportedMediaType"

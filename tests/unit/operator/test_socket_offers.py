"""Whether a pod that requests the agent's socket may have to wait, by what the API server shows of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_core import keys
from perseus_operator.servers.socket_offers import SocketOffers

GPUS = {"nvidia.com/gpu": "8"}
OFFER = {keys.RESOURCE_AGENT: "10k"}


def node(name: str, allocatable: dict[str, str], *, ready: str = "True", **more: Any) -> dict[str, Any]:
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": name, "labels": more.get("labels")}, "spec": more.get("spec"), "status": status}


def seen(*nodes: dict[str, Any]) -> SocketOffers:
    offers = SocketOffers()
    for each in nodes:
        offers.observe_node(each, deleted=False)
    return offers


def test_every_gpu_node_must_offer_it() -> None:
    assert seen(node("a", GPUS | OFFER), node("b", GPUS | OFFER)).lacking() == ""
    partly = seen(node("a", GPUS | OFFER), node("b", GPUS), node("c", GPUS | {keys.RESOURCE_AGENT: "0"}))
    assert partly.lacking() == "2 of 3 GPU nodes do not offer it, such as b"


@pytest.mark.parametrize(
    "other",
    [
        node("b", {"cpu": "8"}),
        node("b", {"nvidia.com/gpu": "0"}),
        node("b", GPUS, ready="False"),
        node("b", GPUS, ready="Unknown"),
        node("b", GPUS, spec={"unschedulable": True}),
    ],
)
def test_a_node_that_takes_no_training_pod_does_not_count(other: dict[str, Any]) -> None:
    assert seen(node("a", GPUS | OFFER), other).lacking() == ""


@pytest.mark.parametrize("gpus", [{"nvidia.com/mig-1g.5gb": "7"}, {"nvidia.com/gpu.shared": "4"}])
def test_all_kinds_of_gpus_count(gpus: dict[str, str]) -> None:
    assert "such as b" in seen(node("a", GPUS | OFFER), node("b", gpus)).lacking()


def test_gpus_of_claims_are_known_by_the_label_and_by_their_slices() -> None:
    assert "such as b" in seen(node("b", {"cpu": "8"}, labels={"nvidia.com/gpu.present": "true"})).lacking()
    offers = seen(node("a", OFFER), node("b", {"cpu": "8"}))
    assert offers.lacking() == "no node with GPUs is known"
    for name in ("a", "b"):
        offers.observe_slice(published(name), deleted=False)
    assert offers.lacking() == "1 of 2 GPU nodes do not offer it, such as b"
    offers.observe_slice(published("b"), deleted=True)
    assert offers.lacking() == ""


@pytest.mark.parametrize("other", [{"driver": "net.example"}, {"nodeName": None}, {"nodeName": "gone"}])
def test_slices_that_are_no_gpus_of_a_known_node_do_not_count(other: dict[str, Any]) -> None:
    offers = seen(node("a", GPUS | OFFER), node("b", {"cpu": "8"}))
    offers.observe_slice(published("b", **other), deleted=False)
    assert offers.lacking() == ""


def published(node_name: str, **more: Any) -> dict[str, Any]:
    spec = {"driver": keys.DRA_DRIVER, "nodeName": node_name, "pool": {"name": node_name}, **more}
    return {"metadata": {"name": f"{node_name}-gpus"}, "spec": spec}


def test_it_follows_changes_and_deletions() -> None:
    offers = seen(node("a", GPUS | OFFER), node("b", GPUS))
    assert offers.lacking()
    offers.observe_node(node("b", GPUS | OFFER), deleted=False)
    assert not offers.lacking()
    offers.observe_node(node("b", GPUS), deleted=False)
    assert offers.lacking()
    offers.observe_node(node("b", GPUS), deleted=True)
    assert not offers.lacking()


def test_before_a_node_is_known_none_offers_it() -> None:
    assert seen().lacking() == "no node with GPUs is known"
    assert SocketOffers().lacking() == seen(node("a", {"cpu": "8"})).lacking()

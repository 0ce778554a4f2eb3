"""Engines on a node: what their agent holds for them, what is sent next, and what of their reports is believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.lengths import LENGTH_PLACES
from perseus_core.serving import FOLLOW_TABLE, TIME_EDGES_US, ClockTable, EngineOrders, PageAddress, ServingLimits
from perseus_operator.clients.agents.engines import EngineJoined, engine_of, is_valid_window, orders_request, window_of
from perseus_operator.clients.agents.messages import event_of, is_valid, lease_of
from perseus_operator.nodes.actions import Acquire, AwaitRenewal, Intent, Order, Release, Renew, next_actions
from perseus_operator.nodes.engines import MOST_ENGINES, Engine, EngineWindow, NodeEngines, orders_for
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Node
from perseus_operator.objects.values import Pod
from perseus_proto.v1alpha1 import agent_pb2 as pb

TABLE = ClockTable((8, 32), (0.5, 1.0), ((900, 1005), (1005, 1200)), (900, 1005, 1200), (1200, 0))
LIMITS = ServingLimits(1.0, 0.05, 0.99)
ORDERS = EngineOrders(LIMITS, TABLE, {"pod-0": FOLLOW_TABLE, "pod-1": 900, "elsewhere": FOLLOW_TABLE})
ENGINE = Engine("pod-0", 7, "vllm", "0.11.0", "llama", "tp 1", (("max-num-seqs", "64"),), ("GPU-0",))
WINDOW = EngineWindow(pod_uid="pod-0", pid=7, time_us=1_000_000, steps=40, steps_us=900_000, held_us={"Floor": 10**6})
NOW_S, TTL_S = 100.0, 15.0


def nodes_of(*pods: str) -> JobNodes:
    nodes = JobNodes()
    nodes.pods_observed([Pod(uid, "ns", uid, "node", "pool", {}) for uid in pods], {"node": "10.0.0.1:1"})
    return nodes


def leased(node: Node, orders_id: str = "") -> None:
    node.lease_acquired(
        node.pods, plan_id="", following=False, started_s=NOW_S, ttl_s=TTL_S, clock=None, orders_id=orders_id
    )


def needed(nodes: JobNodes, orders: EngineOrders | None, *, drive: bool = True, now_s: float = NOW_S) -> Any:
    [(action, _)] = next_actions(nodes, Intent(None, {}, drive, None, orders=orders), now_s=now_s)
    return action


def test_orders_follow_the_lease_and_concern_the_nodes_own_pods() -> None:
    nodes = nodes_of("pod-0", "pod-1", "pod-2")
    node = nodes["node"]
    assert needed(nodes, ORDERS) == Acquire("node")
    leased(node)
    own = replace(ORDERS, clocks_mhz={"pod-0": FOLLOW_TABLE, "pod-1": 900})
    assert needed(nodes, ORDERS) == Order("node", own)
    node.engines.accepted(own, "id-1")
    assert needed(nodes, ORDERS) is None
    assert needed(nodes, replace(ORDERS, clocks_mhz={"pod-0": 1005})) == Order(
        "node", replace(ORDERS, clocks_mhz={"pod-0": 1005})
    )
    assert needed(nodes, None) == Order("node", None), "default clocks are ordered, too"
    assert needed(nodes, None, drive=False) == Order("node", None), "whatever the mode, what was ordered is taken back"


def test_nothing_is_ordered_where_nothing_is_wanted() -> None:
    nodes = nodes_of("pod-0")
    leased(nodes["node"])
    assert needed(nodes, None, drive=False) is None
    assert needed(nodes, replace(ORDERS, clocks_mhz={"pod-0": 0})) is None
    assert needed(nodes, replace(ORDERS, clocks_mhz={"elsewhere": 900})) is None


def test_a_lease_says_whether_the_orders_are_still_held() -> None:
    nodes = nodes_of("pod-1")
    node, own = nodes["node"], replace(ORDERS, clocks_mhz={"pod-1": 900})
    leased(node)
    node.engines.accepted(own, "id-1")
    node.lease_renewed(started_s=NOW_S, ttl_s=TTL_S, orders_id="id-1")
    assert needed(nodes, ORDERS) is None
    node.lease_renewed(started_s=NOW_S, ttl_s=TTL_S, orders_id="")
    assert needed(nodes, ORDERS) == Order("node", own), "the agent holds them no more"
    node.engines.accepted(own, "id-1")
    node.lease_lost()
    assert needed(nodes, ORDERS) == Acquire("node")
    leased(node, orders_id="id-1")
    assert needed(nodes, ORDERS) == Order("node", own), "after a restart nobody knows what that name means"
    assert needed(nodes, None) == Order("node", None)


def test_an_order_waits_for_a_renewal_and_a_renewal_that_is_due_goes_first() -> None:
    nodes = nodes_of("pod-1")
    node = nodes["node"]
    leased(node)
    assert needed(nodes, ORDERS, now_s=node.renew_at_s) == Renew("node")
    node.renewal_started()
    assert needed(nodes, ORDERS, now_s=node.renew_at_s) == AwaitRenewal("node")
    nodes.pods_observed([], {"node": "10.0.0.1:1"})
    node.renewal_ended()
    assert needed(nodes, ORDERS) == Release("node")


def test_engines_of_pods_that_have_gone_are_gone_and_their_number_is_bounded() -> None:
    engines = NodeEngines()
    for pid in range(2 * MOST_ENGINES):
        engines.joined(replace(ENGINE, pid=pid))
    assert len(engines.by_process) == MOST_ENGINES
    engines.left(replace(ENGINE, pid=0))
    assert len(engines.by_process) == MOST_ENGINES - 1
    engines.pods_observed({"pod-1"})
    assert not engines.by_process


def test_the_gpus_of_engines_are_the_jobs() -> None:
    nodes = nodes_of("pod-0")
    nodes["node"].engines.joined(ENGINE)
    assert nodes["node"].gpu_uuids == {"GPU-0"}


def test_orders_on_the_wire() -> None:
    request = orders_request("uid", 3, orders_for(ORDERS, ["pod-0", "pod-1"]))
    assert (request.job_uid, request.epoch) == ("uid", 3)
    assert list(request.table.running) == [8, 32]
    assert list(request.table.kv_share_ppm) == [500_000, 1_000_000]
    assert list(request.table.clocks_mhz) == [900, 1005, 1005, 1200]
    assert list(request.table.boost_mhz) == [1200, 0]
    assert (request.limits.first_token_us, request.limits.per_token_us) == (1_000_000, 50_000)
    assert request.limits.attainment_ppm == 990_000
    assert [(o.pod_uid, o.follow_table, o.clock_mhz) for o in request.orders] == [
        ("pod-0", True, 0),
        ("pod-1", False, 900),
    ]
    nothing = orders_request("uid", 3, None)
    assert not nothing.HasField("table")
    assert not nothing.orders
    assert nothing.limits.attainment_ppm > 0, "an agent refuses limits without a share"
    assert lease_of(pb.Lease(orders_id="id-1")).orders_id == "id-1"


def test_pages_on_the_wire_go_to_their_own_node() -> None:
    orders = EngineOrders(LIMITS, pages={"pod-0": PageAddress("10.0.0.9", 8_000), "elsewhere": PageAddress("::1", 80)})
    own = orders_for(orders, ["pod-0"])
    assert own is not None, "a page is read whatever the clocks are"
    [page] = orders_request("uid", 3, own).pages
    assert (page.pod_uid, page.host, page.port, page.path) == ("pod-0", "10.0.0.9", 8_000, "/metrics")
    assert orders_for(orders, ["pod-1"]) is None


def test_a_lease_says_why_no_engine_is_followed() -> None:
    many = [pb.EngineFault(pod_uid=f"pod-{number}", message="x" * 10_000) for number in range(2 * MOST_ENGINES)]
    faults = lease_of(pb.Lease(engine_faults=many)).engine_faults
    assert len(faults) == MOST_ENGINES
    assert max(map(len, faults.values())) <= 512


def test_an_engine_on_the_wire() -> None:
    message = pb.Engine(
        pod_uid="pod-0",
        pid=7,
        name="vllm",
        version="0.11.0",
        model="llama",
        parallelism="tp 1",
        flags=[pb.EngineFlag(name="max-num-seqs", value="64")],
        gpu_uuids=["GPU-0"],
    )
    assert engine_of(message) == ENGINE
    assert event_of(pb.TelemetryEvent(engine_joined=message)) == EngineJoined(ENGINE)
    for lie in (
        {"model": "x" * 513},
        {"model": "a\nb"},
        {"flags": [pb.EngineFlag(name=str(number)) for number in range(257)]},
        {"flags": [pb.EngineFlag(name="b"), pb.EngineFlag(name="a")]},
        {"flags": [pb.EngineFlag(name="a", value="x" * 1_025)]},
        {"gpu_uuids": ["GPU"] * 65},
        {"pod_uid": "x" * 513},
    ):
        lied = pb.Engine()
        lied.CopyFrom(message)
        for name in lie:
            lied.ClearField(name)
        lied.MergeFrom(pb.Engine(**lie))
        assert engine_of(lied) is None, lie


def test_a_window_on_the_wire() -> None:
    message = pb.EngineWindow(
        pod_uid="pod-0",
        pid=7,
        time_us=1_000_000,
        clock_mhz=900,
        running_milli=12_500,
        kv_share_ppm=250_000,
        steps=40,
        steps_us=900_000,
        energy_mj=300_000,
        has_energy=True,
        first_tokens=pb.Counted(places=[3, 9], counts=[1, 2]),
        held=[pb.HeldFor(reason="Floor", time_us=1_000_000)],
        lengths=pb.Counted(places=[40], counts=[7]),
    )
    window = event_of(pb.TelemetryEvent(window=message))
    assert isinstance(window, EngineWindow)
    assert is_valid(window)
    assert (window.running, window.kv_share, window.energy_mj) == (12.5, 0.25, 300_000)
    assert (window.first_tokens, window.tokens, window.held_us) == ({3: 1, 9: 2}, {}, {"Floor": 1_000_000})
    assert window.lengths == {40: 7}
    for places, counts in (([1], [1, 2]), ([2, 1], [1, 1]), ([1, 1], [1, 1]), (range(300), range(300))):
        assert window_of(pb.EngineWindow(tokens=pb.Counted(places=places, counts=counts))) is None
    assert window_of(pb.EngineWindow(lengths=pb.Counted(places=range(500), counts=range(500)))) is None
    assert window_of(pb.EngineWindow(held=[pb.HeldFor(reason="Floor")] * 17)) is None


@pytest.mark.parametrize(
    "lie",
    [
        {"time_us": 0},
        {"time_us": 2**63},
        {"clock_mhz": 2**31},
        {"median_clock_mhz": 2**31},
        {"default_us": 1_000_001},
        {"mhz_us": 2**63},
        {"running": 65_537.0},
        {"kv_share": 1.1},
        {"steps": 2**31},
        {"steps_us": 1_200_001},
        {"prompt_steps_us": 300_001},
        {"prompt_tokens": 2**63},
        {"generated_tokens": 2**63},
        {"energy_mj": 2**62},
        {"waiting": 2**31},
        {"requests": 2**31},
        {"first_tokens": {len(TIME_EDGES_US) + 1: 1}},
        {"lengths": {LENGTH_PLACES: 1}},
        {"tokens": {0: 2**31}},
        {"held_us": {"Floor": 1_000_001}},
        {"held_us": {"no word": 1}},
        {"pod_uid": "x" * 513},
    ],
    ids=str,
)
def test_a_window_that_cannot_be_is_not_believed(lie: dict[str, Any]) -> None:
    assert is_valid_window(WINDOW)
    assert not is_valid_window(replace(WINDOW, **lie))


def test_a_window_of_an_engine_that_rested_is_believed() -> None:
    assert is_valid_window(replace(WINDOW, time_us=1_800_000_000, default_us=1_800_000_000))


@given(st.binary(max_size=200))
def test_whatever_bytes_a_tenant_sends_are_a_window_or_nothing(data: bytes) -> None:
    try:
        message = pb.EngineWindow.FromString(data)
    except DecodeError:
        return
    window = window_of(message)
    assert window is None or is_valid_window(window) in (True, False)

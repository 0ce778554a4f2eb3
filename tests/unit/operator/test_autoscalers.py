"""HorizontalPodAutoscalers are read whatever they hold; one that is near raises clocks."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.autoscaler import Autoscaler as Double
from tests.doubles.engine_pool import EnginePool
from tests.unit.operator.test_listing import served

from perseus_core.serving import FOLLOW_TABLE
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.controller.autoscalers import Autoscalers
from perseus_operator.errors import KubeError, KubeForbidden, KubeNotFound, KubeUnavailable
from perseus_operator.families.serving.features.autoscaler.reading import (
    TOLERANCE,
    Autoscaler,
    autoscalers_of,
    quantity,
    target_of,
    targets_of,
)
from perseus_operator.families.serving.status.explanation import HELD
from perseus_operator.objects.values import Owner, Pod

LLAMA = {("apps", "Deployment", "llama")}


def body(*metrics: dict[str, Any], current: list[Any] | None = None, **spec: Any) -> dict[str, Any]:
    """An HPA of four replicas with these metrics, as of the spec, and what was measured of them."""
    return {
        "metadata": {"name": "hpa"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"},
            "maxReplicas": 8,
            "metrics": list(metrics),
            **spec,
        },
        "status": {"currentReplicas": 4, "desiredReplicas": 4, "currentMetrics": current},
    }


def pods(name: str, aim: str, value: str | None = None) -> dict[str, Any]:
    """A metric of pods, as of the spec, or with a value of the status."""
    target = {"target": {"type": "AverageValue", "averageValue": aim}}
    measured = target if value is None else {"current": {"averageValue": value}}
    return {"type": "Pods", "pods": {"metric": {"name": name}, **measured}}


def read(one: dict[str, Any]) -> Autoscaler | None:
    return next(iter(autoscalers_of([one], LLAMA)), None)


GOOD = body(pods("running", "8"), current=[pods("running", "8", "6500m")])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1500m", 1.5),
        ("12", 12.0),
        (3, 3.0),
        ("2Ki", 2048.0),
        ("1e3", 1e3),
        ("1E", 1e18),
        ("250u", 2.5e-4),
        (".5", 0.5),
    ],
)
def test_quantities_are_those_of_kubernetes(written: Any, value: float) -> None:
    assert quantity(written) == pytest.approx(value)


@pytest.mark.parametrize("written", ["", "many", "-1", "1 k", "1x", "1e999", "9" * 200, None, True, 1.5, [], {}, "１"])
def test_what_is_no_quantity_is_none(written: Any) -> None:
    assert quantity(written) is None


@pytest.mark.parametrize(
    ("source", "kind", "field"),
    [
        ({"type": "Resource", "resource": {"name": "cpu"}}, "Utilization", "averageUtilization"),
        ({"type": "Resource", "resource": {"name": "cpu"}}, "AverageValue", "averageValue"),
        (
            {"type": "ContainerResource", "containerResource": {"name": "cpu", "container": "vllm"}},
            "Utilization",
            "averageUtilization",
        ),
        ({"type": "Pods", "pods": {"metric": {"name": "kv"}}}, "AverageValue", "averageValue"),
        ({"type": "Object", "object": {"metric": {"name": "queue"}}}, "Value", "value"),
        ({"type": "External", "external": {"metric": {"name": "ttft"}}}, "AverageValue", "averageValue"),
    ],
)
def test_each_type_of_metric_and_of_target_is_read(source: dict[str, Any], kind: str, field: str) -> None:
    wanted, measured = copy.deepcopy(source), copy.deepcopy(source)
    place = next(name for name in source if name != "type")
    wanted[place]["target"] = {"type": kind, field: 80 if "Utilization" in field else "80"}
    measured[place]["current"] = {field: 60 if "Utilization" in field else "60"}
    autoscaler = read(body(wanted, current=[measured]))
    assert autoscaler is not None
    assert autoscaler.nearest.pressure == pytest.approx(0.75)


def test_the_greatest_of_several_metrics_decides_and_one_that_was_not_measured_is_left_out() -> None:
    metrics = pods("a", "8"), pods("b", "10"), pods("c", "1")
    autoscaler = read(body(*metrics, current=[pods("a", "8", "4"), pods("b", "10", "9"), {"type": ""}]))
    assert autoscaler is not None
    assert (autoscaler.nearest.name, autoscaler.nearest.pressure) == ("b", 0.9)
    assert (autoscaler.least, autoscaler.most, autoscaler.replicas) == (1, 8, 4)
    assert (autoscaler.up_tolerance, autoscaler.down_tolerance) == (TOLERANCE, TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        *("s0-perseus-advised-replicas", "perseus_pool_advised_replicas"),
        *("http_requests_per_second", "requests-per-second", "vllm_rps", "QPS"),
    ],
)
def test_what_no_clock_changes_counts_as_no_metric(name: str) -> None:
    assert read(body(pods(name, "1"), current=[pods(name, "1", "2")])) is None
    both = read(body(pods(name, "1"), pods("a", "8"), current=[pods(name, "1", "2"), pods("a", "8", "4")]))
    assert both is not None
    assert both.nearest.name == "a"
    assert both.steady


@pytest.mark.parametrize("name", ["seconds_per_token", "per_second_latency", "corps", "vllm:num_requests_running"])
def test_what_a_clock_may_change_counts(name: str) -> None:
    assert read(body(pods(name, "1"), current=[pods(name, "1", "2")])) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"currentMetrics": None},
        {"currentMetrics": []},
        {"currentReplicas": 0},
        {"conditions": [{"type": "ScalingActive", "status": "False"}]},
    ],
)
def test_an_autoscaler_that_does_not_act_counts_as_nothing(change: dict[str, Any]) -> None:
    assert read(GOOD) is not None
    assert read({**GOOD, "status": {**GOOD["status"], **change}}) is None


def test_the_number_that_is_wanted_is_that_of_the_formula() -> None:
    tolerant = {"scaleUp": {"tolerance": "50m"}, "scaleDown": {"tolerance": "0"}}
    autoscaler = read(body(pods("a", "8"), current=[pods("a", "8", "8")], minReplicas=2, behavior=tolerant))
    assert autoscaler is not None
    wanted = [autoscaler.wanted(pressure) for pressure in (0.1, 0.76, 0.75, 1.0, 1.04, 1.06, 9.0)]
    assert wanted == [2, 4, 3, 4, 4, 5, 8]


def test_only_autoscalers_of_the_pool_s_workload_are_its_own() -> None:
    other = copy.deepcopy(GOOD)
    other["spec"]["scaleTargetRef"]["name"] = "other"
    assert autoscalers_of([other], LLAMA) == ()
    assert len(autoscalers_of([GOOD, other, {**GOOD, "metadata": {"name": "again"}}], LLAMA)) == 2


def test_a_workload_is_what_the_spec_names_or_what_made_the_pods() -> None:
    named = parse_spec(PoolSpec, {"workload": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}})
    assert targets_of(named, []) == LLAMA
    owner = Owner("apps/v1", "ReplicaSet", "llama-5d4", "uid")
    pod = Pod("u", "ns", "llama-5d4-x", "node", "pool", {"pod-template-hash": "5d4"}, owner=owner)
    assert targets_of(None, [pod]) == {*LLAMA, ("apps", "ReplicaSet", "llama-5d4")}
    lws = Pod("u", "ns", "s-0", "node", "pool", {"leaderworkerset.sigs.k8s.io/name": "s"}, owner=Owner("apps/v1", "StatefulSet", "s", "u"))  # fmt: skip # noqa: E501
    assert ("leaderworkerset.x-k8s.io", "LeaderWorkerSet", "s") in targets_of(None, [lws])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(strange=JSON, data=st.data())
def test_whatever_stands_in_a_field_an_autoscaler_is_read_or_left_out(strange: Any, data: st.DataObject) -> None:
    one = copy.deepcopy(GOOD)
    at: Any = one
    while True:
        place = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[place], dict | list) or data.draw(st.booleans()):
            at[place] = strange
            break
        at = at[place]
    target_of(one)
    assert len(autoscalers_of([one, GOOD], LLAMA)) >= 1


# --------------------------------------------------------------------------------------------------------- asking


class Many:
    """An API server with more autoscalers than are read."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[str] = []
        self.status = status

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.status != 200:
            return web.json_response({"message": "no"}, status=self.status)
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        return web.json_response({"metadata": {"continue": str(first + limit)}, "items": [GOOD] * limit})


async def test_of_a_namespace_no_more_are_read_than_a_bound() -> None:
    many: Any = Many()
    async with served(many) as kube:
        read, complete = await kube.autoscalers("team")
    assert (len(read), complete) == (500, False)
    assert set(many.asked) == {"/apis/autoscaling/v2/namespaces/team/horizontalpodautoscalers"}


@pytest.mark.parametrize(("status", "error"), [(403, KubeForbidden), (404, KubeNotFound), (503, KubeUnavailable)])
async def test_what_the_api_server_refuses_is_said_as_an_error(status: int, error: type[KubeError]) -> None:
    many: Any = Many(status)
    async with served(many) as kube:
        with pytest.raises(error):
            await kube.autoscalers("team")


class Cluster:
    """Two pools of one namespace, and a job that asks for no autoscalers."""

    def __init__(self, answer: Any, *, complete: bool = True) -> None:
        self.answer, self.complete, self.asked, self.observed = answer, complete, list[str](), list[Any]()
        families = [SimpleNamespace(autoscalers_wanted=wanted) for wanted in (True, True, False)]
        self.runners: list[Any] = [
            SimpleNamespace(family=family, ref=SimpleNamespace(namespace="team"), observe_autoscalers=self._observe)
            for family in families
        ]
        kube: Any = self
        self.reader = Autoscalers(kube, lambda: self.runners)

    async def autoscalers(self, namespace: str) -> tuple[list[Any], bool]:
        self.asked.append(namespace)
        if isinstance(self.answer, KubeError):
            raise self.answer
        return list(self.answer), self.complete

    def _observe(self, bodies: list[Any], *, complete: bool) -> None:
        self.observed.append((bodies, complete))


@pytest.mark.parametrize("complete", [True, False])
async def test_a_namespace_is_asked_once_for_all_its_pools(complete: bool) -> None:
    cluster = Cluster([GOOD], complete=complete)
    await cluster.reader.observe()
    assert (cluster.asked, cluster.observed) == (["team"], [([GOOD], complete)] * 2)


@pytest.mark.parametrize("error", [KubeForbidden("403"), KubeNotFound("404")])
async def test_without_the_right_or_the_api_one_warning_says_so(
    error: KubeError, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(error)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await cluster.reader.observe()
    assert len(caplog.records) == 1
    assert cluster.observed == [([], False)] * 6, "as if there were none, but none is known to be gone"


async def test_where_nothing_answers_what_was_observed_last_stays() -> None:
    cluster = Cluster(KubeUnavailable("503"))
    await cluster.reader.observe()
    assert not cluster.observed


# --------------------------------------------------------------------------------------------------------- a pool


def enforced() -> EnginePool:
    """A pool of a Deployment, whose replicas follow their table."""
    workload = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}
    pool = EnginePool(3, workload=workload)
    pool.run(1_500, until=lambda: FOLLOW_TABLE in pool.clocks and pool.family.pool.model.lowest_mhz is not None)
    pool.run(60)
    assert set(pool.clocks) <= {FOLLOW_TABLE, 0}
    return pool


def test_a_pool_raises_its_clocks_for_an_autoscaler_says_so_and_lowers_them_after_the_hold() -> None:
    pool = enforced()
    near, far = Double(3, least=3, tolerance=0.1), Double(3, least=3, tolerance=0.1)
    near.look(0.0, 3.0)
    far.look(0.0, 0.6)
    assert pool.family.autoscalers_wanted
    assert not pool.family.autoscalers_observed([near.body(target="other"), far.body()], complete=True)
    pool.run(2)
    assert FOLLOW_TABLE in pool.clocks, "there is room, or it is of another workload"
    assert pool.conditions()[ConditionType.CLOCKS_APPLIED].reason is Reason.TABLE_IN_FORCE
    assert pool.family.autoscalers_observed([near.body()], complete=True)
    pool.run(2)
    assert pool.clocks == [0, 0, 0]
    applied = pool.conditions()[ConditionType.CLOCKS_APPLIED]
    assert (applied.status, applied.reason) == (True, Reason.AUTOSCALER_NEAR)
    for word in ("llama-hpa", "running", "1 of 1"):
        assert word in applied.message
    status = pool.status()
    assert {one["limitedBy"] for one in status["replicas"]} == {Reason.AUTOSCALER_NEAR.value}
    assert Reason.AUTOSCALER_NEAR.value in HELD
    began, free = pool.second, False
    while not free:
        pool.run(15)
        free = pool.family.autoscalers_observed([far.body()], complete=True)
        assert free or pool.clocks == [0, 0, 0]
    assert 300 <= pool.second - began <= 330
    pool.run(2)
    assert FOLLOW_TABLE in pool.clocks


def test_a_deleted_autoscaler_holds_no_clock_any_more_but_one_that_was_not_read_does() -> None:
    pool = enforced()
    near = Double(3, least=3, tolerance=0.1)
    near.look(0.0, 3.0)
    assert pool.family.autoscalers_observed([near.body()], complete=True)
    pool.run(15)
    assert not pool.family.autoscalers_observed([], complete=False)
    pool.run(15)
    assert pool.family.autoscalers_observed([], complete=True)
    pool.run(2)
    assert FOLLOW_TABLE in pool.clocks


def test_beside_an_autoscaler_that_is_near_no_clock_is_tried() -> None:
    pool = EnginePool(2, workload={"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"})
    near = Double(2, tolerance=0.1)
    near.look(0.0, 2.0)
    pool.family.autoscalers_observed([near.body()], complete=True)
    pool.run(60)
    assert pool.clocks == [0, 0]
    applied = pool.conditions()[ConditionType.CLOCKS_APPLIED]
    assert (applied.status, applied.reason) == (False, Reason.AUTOSCALER_NEAR)


@pytest.mark.parametrize("change", [{"mode": "Observe"}, {"suspend": True}])
def test_a_pool_that_sets_no_clocks_asks_for_no_autoscaler(change: dict[str, Any]) -> None:
    assert not EnginePool(1, **change).family.autoscalers_wanted

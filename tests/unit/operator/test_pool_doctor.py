"""The doctor of ServingPools: one sentence where one looks, for each mistake."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from tests.doubles.engine_pool import OBJECTIVE, EnginePool
from tests.doubles.plugin_pool import (
    LIMITS,
    MANIFEST,
    MAY,
    PODS,
    PROMISED,
    SIGNALS,
    Cluster,
    answer,
    asked,
    command,
    pool,
)

from perseus_agent.node import pages
from perseus_core import keys
from perseus_operator.api.conditions import Reason
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.job import Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.errors import InvalidSpec, KubeForbidden
from perseus_operator.families.serving.decide import no_limits
from perseus_operator.families.serving.status.explanation import next_step, pool_explanation
from perseus_operator.jobs.waiting import no_clocks
from perseus_operator.objects.values import Json
from perseus_operator.plugin import pool_doctor
from perseus_operator.plugin.pool_doctor import Surroundings, examine_pool
from perseus_reader.pages import BadPage, read_page
from perseus_reader.source import PageSource


def test_a_pool_that_saves_has_good_steps_alone(cluster: Cluster) -> None:
    document = answer("doctor", "llama")
    assert {step["finding"] for step in document["steps"]} == {"good"}
    assert document["verdict"].startswith("It saves 31.40% of a token's energy (28.10% to 34.60% with 95%")
    del cluster.stored_pools[0]["status"]["savings"]
    document = answer("doctor", "llama")
    assert "follow the load; what that saves is not measured yet" in document["verdict"]
    step = asked(document)["Is it known what is saved?"]
    assert step["finding"] == "waiting"
    assert step["says"] == pool_explanation(cluster.stored_pools[0])["summary"]["unmeasured"]


def test_a_pool_with_a_slowdown_waits_for_its_baseline_and_not_for_limits() -> None:
    """Seen on the real cluster: it was said to have no limit, with the advice to ask the doctor."""
    counted = "463 of 1,000 requests have ended at default clocks, for the baseline."
    said = ("False", "MeasuringBaseline", counted)
    waits = pool(
        {"mode": "Enforce", "objective": {"maxSlowdown": "20%"}}, ProfileReady=said, ClocksApplied=said, Ready=said
    )
    document = examine_pool(waits, Surroundings())
    assert document["verdict"] == f"It waits: {counted}"
    assert asked(document)[PROMISED]["finding"] == "good"
    waits["status"]["proposedLimits"] = {"timePerOutputToken": "25ms"}
    assert asked(examine_pool(waits, Surroundings()))[PROMISED]["finding"] == "fault", "a page says too little"


@pytest.mark.parametrize(
    ("share", "says"),
    [
        ({"watts": 1800, "slowdown": "12.50%"}, "1,800 W are granted: slowed by PowerBudget hall by 12.50%."),
        ({"watts": 1800}, "PowerBudget hall grants 1,800 W, which do not slow it."),
        ({}, "PowerBudget hall has granted nothing yet."),
    ],
)
def test_it_says_whether_a_power_budget_slows_the_pool(cluster: Cluster, share: Json, says: str) -> None:
    cluster.stored_pools[0]["status"]["powerBudget"] = {"name": "hall", **share}
    step = asked(answer("doctor", "llama"))["Does a PowerBudget slow it?"]
    assert (step["finding"], step["says"]) == ("note", says)
    assert ("budget", says.rstrip(".")) in [(row["what"], row["says"]) for row in answer("explain", "llama")["why"]]


def page_fault(port: int) -> str:
    """What the reader says of a page where nobody listens."""
    with pytest.raises(BadPage) as raised:
        PageSource("127.0.0.1", port, "/metrics").fetch()
    return str(raised.value)


def engine_fault(page: bytes) -> str:
    with pytest.raises(BadPage) as raised:
        read_page(page)
    return str(raised.value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("fault", "do"),
    [
        (lambda: pages._NO_READER, "set agent.reader.enabled=true in the chart"),
        (lambda: engine_fault(b'\ntgi_request_count{method="x"} 1\n'), "this engine is not followed"),
        (lambda: engine_fault(b'\nvllm:kv_cache_usage_perc{m="x"} 0\n'), "update the engine"),
        (lambda: page_fault(free_port()), "set spec.engine.port"),
        (lambda: "http://10.0.0.1:8000/metrics answers 404", "set spec.engine.path and port"),
        (lambda: "its page was not read yet", "wait"),
    ],
    ids=["reader off", "TGI", "old engine", "wrong port", "wrong path", "just begun"],
)
def test_the_doctor_knows_why_an_engine_says_nothing(fault: Any, do: str) -> None:
    said = f"No engine of pod llama-a says what it does: default clocks. llama-a: {fault()}"
    found = pool(SignalsReady=("False", "NoSignal", said), Ready=("False", "NoSignal", said))
    document = examine_pool(found, Surroundings())
    step = asked(document)[SIGNALS]
    assert (step["finding"], document["verdict"]) == ("fault", f"It does not save: {said}")
    assert do in step["do"]
    assert asked(document)[PODS]["finding"] == "good"


def test_a_pod_without_the_socket_is_named(cluster: Cluster) -> None:
    said = f"No engine of pod llama-a says what it does: default clocks. llama-a: {pages._NO_READER}"
    cluster.stored_pools = [pool(SignalsReady=("False", "NoSignal", said))]
    env = [{"name": keys.ENV_SOCKET, "value": "/run/perseus/agent.sock"}]
    cluster.stored_pods = [
        {"metadata": {"name": "llama-a"}, "spec": {"containers": [{"name": "vllm"}]}},
        {"metadata": {"name": "llama-b"}, "spec": {"containers": [{"name": "vllm", "env": env}]}},
    ]
    step = asked(answer("doctor", "llama"))[SIGNALS]
    assert "The agent's socket is not in pod llama-a," in step["says"]
    assert "the webhook does so" in step["do"]
    cluster.refused |= {"pods", "workloads"}
    assert "socket" not in asked(answer("doctor", "llama"))[SIGNALS]["says"], "who may not read pods is answered, too"


NO_PODS = ("False", "NoPods", "No worker of Deployment llama with the label of the job is running.")
LABELLED: Json = {"metadata": {"labels": {keys.LABEL_JOB: "llama"}}}


@pytest.mark.parametrize(
    ("workload", "says", "do"),
    [
        (None, "Deployment llama does not exist in this namespace.", "name in spec.workload"),
        ({"spec": {"replicas": 0, "template": LABELLED}}, "llama has 0 replicas.", "kubectl scale deployment/llama"),
        ({"spec": {"replicas": 2, "template": {}}}, f"lacks the label {keys.LABEL_JOB}: llama.", "add that label"),
        ({"spec": {"template": LABELLED}}, NO_PODS[2], "label the pod template perseus.energy/job: llama"),
    ],
    ids=["absent", "zero replicas", "no label", "neither"],
)  # fmt: skip
def test_the_doctor_knows_why_there_are_no_pods(cluster: Cluster, workload: Json | None, says: str, do: str) -> None:
    cluster.stored_pools = [pool(SignalsReady=NO_PODS, Ready=NO_PODS)]
    cluster.workloads = {} if workload is None else {"llama": workload}
    step = asked(answer("doctor", "llama"))[PODS]
    assert step["finding"] == "fault"
    assert says in step["says"]
    assert do in step["do"]


def test_limits_of_unlike_attainment_are_refused_with_the_rule() -> None:
    objective = {**LIMITS, "timePerOutputToken": {"limit": "50ms", "attainment": "95%"}}
    with pytest.raises(InvalidSpec) as raised:
        parse_spec(PoolSpec, {"objective": objective})
    said = ("False", "SpecInvalid", str(raised.value))
    document = examine_pool(
        pool({"objective": objective, "mode": "Enforce"}, Accepted=said, Ready=said), Surroundings()
    )
    step = asked(document)[MANIFEST]
    assert "must have the same attainment" in step["says"]
    assert step["do"] == "correct the field that the message names"


def test_a_job_of_the_same_name_is_named_to_whoever_asks_about_either(cluster: Cluster) -> None:
    said = (
        "False",
        "NameTaken",
        "The PerseusJob llama has this name, and the pods that opted in with it: rename either.",
    )
    cluster.stored_pools = [pool(Accepted=said, Ready=said)]
    cluster.jobs_named.append("llama")
    code, out, _ = command("doctor", "llama")
    assert code == 0
    assert "Note: a ServingPool has this name, too: kubectl perseus doctor sp/llama is about it." in out
    step = asked(answer("doctor", "sp/llama"))[MANIFEST]
    assert (step["finding"], step["says"]) == ("fault", said[2])
    assert "rename" in step["do"]


def test_a_pool_without_limits_has_a_command_that_sets_them(cluster: Cluster) -> None:
    said = ("False", "NoLimits", no_limits(EnginePool(objective={}).family.pool).message)
    bare = pool({"mode": "Enforce"}, ClocksApplied=said, ProfileReady=("False", "NoLimits", "-"))
    bare["status"]["proposedLimits"] = {"timePerOutputToken": "31ms"}
    cluster.stored_pools = [bare]
    document = answer("doctor", "llama")
    assert document["verdict"] == "It does not save: spec.objective has no limit, so no clock is set."
    assert '{"timePerOutputToken": {"limit": "31ms"}}' in asked(document)[PROMISED]["do"]
    assert [step["finding"] for step in document["steps"]].count("fault") == 1, "what follows from it is no other fault"
    bare["metadata"]["labels"] = {keys.LABEL_CLASS: "default"}
    cluster.classes["default"] = {"serving": {"objective": LIMITS}}
    step = asked(answer("doctor", "llama"))[PROMISED]
    assert "has limits by now" in step["says"]
    assert step["do"].startswith("delete the pool")


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.RECOMMEND])
def test_a_pool_that_only_observes_does_not_save_and_says_why(mode: Mode) -> None:
    waiting = no_clocks(mode)
    said = {"ClocksApplied": ("False", waiting.reason.value, waiting.message)}
    document = examine_pool(pool({"objective": LIMITS, "mode": mode.value}, **said), Surroundings())
    assert document["verdict"] == f"It does not save: spec.mode is {mode.value}: no clock is set, so nothing is saved."
    assert "spec.mode: Canary" in asked(document)[MAY]["do"]


def test_requests_that_miss_a_limit_come_first() -> None:
    said = ("False", "ObjectiveMissed", "Of 1,000 requests 97.00% kept the limit of the first token; 99.00% shall.")
    document = examine_pool(pool(ObjectiveKept=said, Ready=said), Surroundings())
    assert document["verdict"].startswith("Requests miss what they were promised: Of 1,000 requests 97.00%")


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason in pool_doctor.ADVICE])
def test_a_condition_of_any_reason_is_an_answer_for_pools(reason: Reason) -> None:
    """Those of a later release, too; and none of its advice speaks of the job that a pool is not."""
    for name in (reason.value, "OfALaterRelease"):
        said = ("False", name, "It is so.")
        document = examine_pool(
            pool(SignalsReady=said, ProfileReady=said, ClocksApplied=said, Ready=said), Surroundings()
        )
        assert document["verdict"].split(":")[0] in ("It does not save", "It waits")
        assert all(step.get("do") != "" for step in document["steps"])


def test_a_class_that_cannot_be_read_is_no_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.stored_pools = [pool({"mode": "Enforce"}, labels={keys.LABEL_CLASS: "default"})]

    def refuse(_: str) -> Json:
        raise KubeForbidden("not yours")

    monkeypatch.setattr(cluster, "energy_class", refuse)
    assert asked(answer("doctor", "llama"))[PROMISED]["finding"] == "fault"
    monkeypatch.setattr(cluster, "energy_class", lambda _: {"spec": {"mode": "Force"}})
    assert asked(answer("doctor", "llama"))[PROMISED]["finding"] == "fault"
    assert parse_spec(ClassSpec, {}).serving is None
    assert pool_explanation(cluster.stored_pools[0])["why"][0]["says"].startswith("made by EnergyClass default")


# ------------------------------------------------------------------------------- what the operator itself has stored


def of(simulated: EnginePool) -> Json:
    """The object as the API server has it."""
    return {
        "metadata": {"name": "llama", "namespace": "team", "generation": 1},
        "spec": {"mode": "Enforce", **simulated._spec},
        "status": simulated.status(),
    }


@pytest.mark.slow
def test_the_doctor_follows_a_pool_from_its_first_pod_to_what_it_saves() -> None:
    simulated = EnginePool(replicas=1, objective={}, mode="Enforce")
    pods = list(simulated._pods)
    simulated.pods()
    assert asked(examine_pool(of(simulated), Surroundings()))[PODS]["finding"] == "fault"
    simulated.pods(*pods)
    simulated.run(60)

    stored = of(simulated)
    found = asked(examine_pool(stored, Surroundings()))
    assert [found[question]["finding"] for question in (PODS, SIGNALS)] == ["good", "good"]
    assert found[PROMISED]["finding"] == "fault"
    patch = json.loads(found[PROMISED]["do"].partition(" -p ")[2].strip("'"))
    simulated.edit(**patch["spec"])
    simulated.run(5)
    document = examine_pool(of(simulated), Surroundings())
    assert document["verdict"].startswith("It waits: r-0 is measured at ")
    assert any(row["what"] == "canary" for row in pool_explanation(of(simulated))["why"])
    assert next_step(of(simulated))["says"].startswith("Wait")

    simulated.edit(objective=OBJECTIVE)
    simulated.run(1_500, until=lambda: simulated.family.pool.model.table is not None)
    simulated.run(30)
    document = examine_pool(of(simulated), Surroundings())
    assert "clocks follow the load; what that saves is not measured yet" in document["verdict"]
    explained = pool_explanation(of(simulated))
    assert explained["next"] == {"says": "Nothing: it goes on by itself."}
    assert {row["what"] for row in explained["why"]} >= {"mode", "limit", "engine", "table", "clocks"}
    assert all(one["why"] != one["limitedBy"] for one in explained["replicas"]), "in words"

    simulated.edit(mode="Observe")
    simulated.run(5)
    document = examine_pool(of(simulated), Surroundings())
    assert document["verdict"].startswith("It does not save: spec.mode is Observe")
    assert '"mode": "Canary"' in next_step(of(simulated))["do"]

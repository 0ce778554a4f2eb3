"""``kubectl perseus`` lists ServingPools, and explains each with the next step; never two answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.doubles.plugin_pool import (
    LIMITS,
    Cluster,
    answer,
    command,
    pool,
)

from perseus_core import keys
from perseus_core.serving import ClockReason
from perseus_operator.api.conditions import Reason
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.families.serving.status.explanation import HELD, next_step
from perseus_operator.objects.values import Json
from perseus_operator.plugin import cli


def test_pools_are_listed_with_what_they_do_and_save(cluster: Cluster) -> None:
    other = pool()
    other["metadata"]["namespace"] = "other"
    cluster.stored_pools.append(other)
    code, out, _ = command("serving")
    assert code == 0
    head, row = out.splitlines()
    columns = "NAMESPACE POOL MODE REPLICAS CLOCK LIMITED BY FIRST TOKEN TOKENS SAVED STATE"
    assert head.split() == columns.split()
    for cell in ("1,100 MHz", "Floor", "99.62% (99% in 1s)", "99.98% (99% in 50ms)", "31.40% (28.10% to 34.60%)"):
        assert f"  {cell}  " in row
    assert row.endswith("TableInForce")
    assert len(answer("serving", "-A")["pools"]) == 2
    assert command("list")[1] == out, "where there is no job"
    cluster.jobs_named.append("gpt3")
    jobs, pools = command("list")[1].split("\n\n")
    assert "gpt3" in jobs
    assert f"{pools}" == out
    cluster.refused.add("pools")
    assert command("list")[1] == jobs + "\n", "whoever may not see pools sees jobs"
    assert command("serving") == (cli.REFUSED, "", 'kubectl perseus: access denied: User "eve" cannot get pools\n')


def test_a_pool_without_limits_is_listed_with_those_that_it_proposes(cluster: Cluster) -> None:
    bare = pool({"mode": "Canary"})
    bare["status"]["proposedLimits"] = {"timeToFirstToken": "812.3ms", "timePerOutputToken": "31ms"}
    cluster.stored_pools = [bare]
    assert "proposed 812.3ms  proposed 31ms" in command("serving")[1]
    document = answer("serving", "llama")
    patch = document["next"]["do"].partition(" -p ")
    assert patch[0] == "kubectl patch servingpool llama -n team --type merge"
    spec = {**bare["spec"], **json.loads(patch[2].strip("'"))["spec"]}
    assert parse_spec(PoolSpec, spec).sets_clocks, "the command makes it save"
    text = command("serving", "llama")[1]
    assert document["next"]["do"] in text, "in one line, to be copied"
    assert "99% of the requests lately kept 812.3ms to the first token and 31ms per token" in text


def test_a_pool_with_a_slowdown_has_the_limits_that_follow_from_its_baseline(cluster: Cluster) -> None:
    relative = pool({"mode": "Enforce", "objective": {"maxSlowdown": "10%"}})
    cluster.stored_pools = [relative]
    text = command("serving", "llama")[1]
    assert "99% of requests take at most 10% longer than at default clocks; these are" in text
    assert "patch" not in text, "it needs no limits of anybody"
    relative["status"]["baseline"] = {"timeToFirstToken": "1s", "timePerOutputToken": "40ms"}
    assert "99.62% (99% in 1.1s)  99.98% (99% in 44ms)" in command("serving")[1]
    text = command("serving", "llama")[1]
    assert "99% of requests shall keep 44ms per token; 99.98% did lately" in text
    assert "; these are" not in text
    by_page = pool({"mode": "Enforce", "objective": {"maxSlowdown": "20%"}})
    by_page["status"]["proposedLimits"] = {"timePerOutputToken": "25ms"}
    cluster.stored_pools = [by_page]
    patch = json.loads(answer("serving", "llama")["next"]["do"].partition(" -p ")[2].strip("'"))
    assert patch == {"spec": {"objective": {"timePerOutputToken": {"limit": "25ms"}, "maxSlowdown": None}}}
    cluster.stored_pools = [relative]
    relative["spec"]["role"] = "Decode"
    assert list(answer("serving", "llama")["summary"]["limits"]) == ["timePerOutputToken"]


def test_an_explanation_says_what_holds_each_clock_and_what_is_saved(cluster: Cluster) -> None:
    text = command("serving", "llama")[1]
    assert text.startswith("team/llama: Enforce, TableInForce\n")
    assert "from 900 MHz up to the default clocks" in text
    assert "31.40% of a token's energy (28.10% to 34.60% with 95% confidence, 41 comparisons)" in text
    row = next(line for line in text.splitlines() if line.startswith("llama-b"))
    assert row.split()[1:5] == ["1,200", "MHz", "99.12%", "Boost"]
    assert HELD["Boost"] in row
    assert "Next: Nothing" in text
    assert command("explain", "llama")[1] == text
    del cluster.stored_pools[0]["status"]["savings"]
    assert "not measured: It takes ten comparisons" in command("serving", "llama")[1]
    trial = {"pod": "llama-a", "clockMegahertz": 1305, "why": "NearLimit"}
    cluster.stored_pools[0]["status"]["canary"] = trial
    cluster.stored_pools[0]["status"]["replicaCount"] = 5
    text = command("explain", "sp/llama")[1]
    assert "llama-a is measured at 1,305 MHz: the next lower clock would come too near to the limit" in text
    assert "and 2 more" in text


def test_the_advice_on_replicas_is_listed_and_explained(cluster: Cluster) -> None:
    there = cluster.stored_pools[0]["status"]["replicaCount"]
    advice = {"replicas": there, "why": "142 requests a minute come.", "startSeconds": 95}
    cluster.stored_pools[0]["status"]["advice"] = advice
    assert "advised" not in command("serving")[1], "as many as there are"
    advice["replicas"] = there + 2
    assert f"  {there} ({there + 2} advised)  " in command("serving")[1]
    said = f"{there + 2} are advised: 142 requests a minute come. A start takes 95 s."
    assert said in " ".join(command("serving", "llama")[1].split())
    cluster.stored_pools[0]["status"]["advice"] = {"why": "Requests are counted for a minute first."}
    assert "no number is advised: Requests are counted" in " ".join(command("serving", "llama")[1].split())


def planned(*names: str) -> Json:
    """The plan of a pool, as its status has it."""
    pools = [
        {"name": name, "share": "50.00%", "gpus": 4, "replicas": 5, "fewestReplicas": 2, "clockMegahertz": 1_200,
         "wattHours": 12_345}
        for name in names
    ]  # fmt: skip
    why = "One pool needs 12.34 kWh a day." if len(names) < 2 else "2 pools by length need less: 3.10% is saved."
    return {"computedAt": "2026-11-30T10:00:00Z", "why": why, "pools": pools, "wattHours": 12_345, "saved": "0.00%",
            "gap": "0.10%"}  # fmt: skip


def test_a_plan_of_pools_by_length_is_a_table_or_manifests(cluster: Cluster) -> None:
    status = cluster.stored_pools[0]["status"]
    code, _, err = command("serving", "plan", "llama")
    assert code == cli.REFUSED
    assert "llama: there is no plan of pools by length yet: it needs a model" in err
    status["plan"] = planned("all")
    text = command("serving", "plan", "sp/llama")[1]
    assert text.splitlines()[1].split() == ["all", "50.00%", "4", "2", "to", "5", "1,200", "MHz", "12.35"]
    assert "One pool needs 12.34 kWh a day." in text
    assert "at most 0.10% less" in text
    assert answer("serving", "plan", "llama")["pools"] == status["plan"]["pools"]
    code, _, err = command("serving", "plan", "llama", "--gateway", "inference")
    assert (code, "there is nothing to route by length: One pool needs" in err) == (cli.REFUSED, True)
    status["plan"] = planned("prompt-s", "prompt-ml")
    manifests = json.loads(command("serving", "plan", "llama", "--gateway", "inference")[1])
    assert [one["kind"] for one in manifests["items"]] == ["InferencePool", "InferencePool", "HTTPRoute"]
    assert [one["metadata"]["name"] for one in manifests["items"][:2]] == ["llama-prompt-s", "llama-prompt-ml"]


def test_words_that_are_no_plan_are_refused_by_name(cluster: Cluster) -> None:
    assert command("serving", "llama", "qwen")[::2] == (
        cli.REFUSED,
        "kubectl perseus: llama qwen: must be POOL, or plan POOL\n",
    )
    assert command("serving", "llama", "--gateway", "g")[::2] == (
        cli.REFUSED,
        "kubectl perseus: --gateway: only with plan POOL\n",
    )
    assert "there is no ServingPool plan" in command("serving", "plan")[2], "a pool may have that name"


def test_every_word_of_the_law_is_explained() -> None:
    assert set(HELD) == {*(reason.value for reason in ClockReason), Reason.AUTOSCALER_NEAR.value}


@pytest.mark.parametrize(
    ("spec", "said", "do"),
    [
        ({"objective": LIMITS, "mode": "Observe"}, {}, '"mode": "Canary"'),
        (
            {"objective": LIMITS, "mode": "Canary"},
            {"ClocksApplied": ("True", "Canary", "One replica follows.")},
            '"mode": "Enforce"',
        ),
        (
            {"objective": LIMITS, "mode": "Enforce"},
            {"SignalsReady": ("False", "NoSignal", "No engine says."), "Ready": ("False", "NoSignal", "No engine.")},
            "kubectl perseus doctor sp/llama -n team",
        ),
        ({"mode": "Enforce"}, {}, None),
    ],
    ids=["observes", "canary", "at fault", "nothing seen"],
)
def test_the_next_step_is_a_command_or_to_wait(spec: Json, said: Any, do: str | None) -> None:
    found = next_step(pool(spec, **said))
    assert found["says"]
    assert (do is None) == ("do" not in found)
    assert do is None or do in found["do"]


def test_a_pool_of_which_nothing_is_known_is_explained(cluster: Cluster) -> None:
    cluster.stored_pools = [{"metadata": {"name": "llama", "namespace": "team"}, "spec": {}}]
    assert "NotSeen" in command("serving")[1]
    assert command("serving", "llama")[0] == 0
    assert "No operator has reported" in answer("doctor", "llama")["verdict"]
    stale = pool()
    stale["metadata"]["generation"], stale["status"]["observedGeneration"] = 3, 2
    cluster.stored_pools = [stale]
    assert "has not seen the latest edit" in answer("doctor", "llama")["verdict"]


@pytest.mark.parametrize("arguments", [("serving",), ("doctor",), ("explain",)])
def test_a_name_that_is_not_there_is_one_error(cluster: Cluster, arguments: tuple[str, ...]) -> None:
    cluster.labels["team"] = {keys.LABEL_CLASS: "default"}
    code, out, err = command(*arguments, "lama")
    assert (code, out) == (cli.REFUSED, "")
    assert err.count("\n") == 1
    assert "ServingPool lama in namespace team: namespace team asks for EnergyClass default, which does not" in err


def test_a_name_of_the_other_kind_leads_there(cluster: Cluster) -> None:
    cluster.jobs_named.append("gpt3")
    assert "but a PerseusJob of this name: kubectl perseus explain gpt3" in command("serving", "gpt3")[2]
    assert "but a ServingPool of this name: kubectl perseus serving llama" in command("frontier", "llama")[2]
    assert command("frontier", "sp/llama")[2].endswith("sp/llama: must be NAME or pj/NAME\n")
    assert command("doctor", "deployment/llama")[2].endswith("must be NAME or pj/NAME, sp/NAME\n")
    assert "one namespace" in command("serving", "llama", "-A")[2]

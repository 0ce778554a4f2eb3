"""``kubectl perseus`` about ServingPools: one sentence where one looks, for each mistake, and never two answers."""

from __future__ import annotations

import io
import json
import socket
from typing import Any

import pytest
from tests.doubles.engine_pool import OBJECTIVE, EnginePool

from perseus_agent.node import pages
from perseus_agent.serving.law import Reason as Held
from perseus_core import keys
from perseus_operator.api.conditions import Reason
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.job import Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.errors import InvalidSpec, KubeError, KubeForbidden, KubeNotFound
from perseus_operator.families.serving.decide import no_limits
from perseus_operator.families.serving.status.explanation import HELD, next_step, pool_explanation
from perseus_operator.jobs.waiting import no_clocks
from perseus_operator.objects.values import Json
from perseus_operator.plugin import cli, pool_doctor
from perseus_operator.plugin.pool_doctor import Surroundings, examine_pool
from perseus_reader.pages import BadPage, read_page
from perseus_reader.source import PageSource

LIMITS: Json = {"timeToFirstToken": {"limit": "1s"}, "timePerOutputToken": {"limit": "50ms", "attainment": "99%"}}
HEALTHY = {
    "Accepted": ("True", "Accepted", "The manifest is valid."),
    "SignalsReady": ("True", "SignalsSeen", "2 replicas report."),
    "ProfileReady": ("True", "ProfileFitted", "812 windows, which the model explains within 2.11%."),
    "ClocksApplied": ("True", "TableInForce", "The clocks of 2 replicas follow their load."),
    "ObjectiveKept": ("True", "ObjectiveKept", "At least 99.00% of 12,345 requests kept each limit."),
    "Ready": ("True", "Ready", "Clocks follow the load."),
}
SAVINGS = {"energy": "31.40%", "low": "28.10%", "high": "34.60%", "blocks": 41, "millijoulesPerToken": 812}
REPLICAS = [
    {"pod": "llama-b", "clockMegahertz": 1200, "limitedBy": "Boost", "attainment": "99.12%"},
    {"pod": "llama-a", "clockMegahertz": 1000, "limitedBy": "Floor", "attainment": "99.90%"},
    {"pod": "llama-c", "clockMegahertz": 1100, "limitedBy": "Floor", "attainment": "99.95%"},
]


def pool(spec: Json | None = None, labels: Json | None = None, **said: tuple[str, str, str]) -> Json:
    """A pool that saves, unless a condition or the spec says otherwise."""
    found = [
        {"type": kind, "status": status, "reason": reason, "message": message}
        for kind, (status, reason, message) in (HEALTHY | said).items()
    ]
    return {
        "metadata": {"name": "llama", "namespace": "team", "labels": labels or {}},
        "spec": {
            "workload": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"},
            **({"objective": LIMITS, "mode": "Enforce"} if spec is None else spec),
        },
        "status": {
            "conditions": found,
            "replicaCount": 3,
            "replicas": REPLICAS,
            "attainment": {"requests": 12_345, "timeToFirstToken": "99.62%", "timePerOutputToken": "99.98%"},
            "engine": {"fingerprint": "f", "engine": "vllm 0.32.0", "model": "llama-70b", "windows": 812,
                       "lowestMegahertz": 900},
            "savings": SAVINGS,
        },
    }  # fmt: skip


class Cluster:
    """A namespace with pools; as the plugin reads it."""

    namespace = "team"

    def __init__(self, *pools: Json) -> None:
        self.stored_pools = list(pools)
        self.jobs_named: list[str] = []
        self.stored_pods: list[Json] = []
        self.workloads: dict[str, Json] = {}
        self.classes: dict[str, Json] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.refused: set[str] = set()

    def _may(self, what: str) -> None:
        if what in self.refused:
            raise KubeForbidden(f'User "eve" cannot get {what}')

    def job(self, namespace: str, name: str) -> Json:
        self._may("jobs")
        if namespace != "team" or name not in self.jobs_named:
            raise KubeNotFound(f'perseusjobs.perseus.energy "{name}" not found')
        return {"metadata": {"name": name, "namespace": namespace}, "spec": {"objective": {}}, "status": {}}

    def jobs(self, namespace: str | None) -> list[Json]:
        return [self.job("team", name) for name in self.jobs_named]

    def pool(self, namespace: str, name: str) -> Json:
        self._may("pools")
        for one in self.stored_pools:
            if (one["metadata"]["namespace"], one["metadata"]["name"]) == (namespace, name):
                return one
        raise KubeNotFound(f'servingpools.perseus.energy "{name}" not found')

    def pools(self, namespace: str | None) -> list[Json]:
        self._may("pools")
        return [one for one in self.stored_pools if namespace in (None, one["metadata"]["namespace"])]

    def pods(self, namespace: str, label: str) -> list[Json]:
        self._may("pods")
        assert label == f"{keys.LABEL_JOB}=llama"
        return self.stored_pods

    def workload(self, api_version: str, plural: str, namespace: str, name: str) -> Json:
        self._may("workloads")
        assert (api_version, plural, namespace) == ("apps/v1", "deployments", "team")
        if name not in self.workloads:
            raise KubeNotFound(f'deployments.apps "{name}" not found')
        return self.workloads[name]

    def energy_class(self, name: str) -> Json:
        if name not in self.classes:
            raise KubeNotFound(f'energyclasses.perseus.energy "{name}" not found')
        return {"metadata": {"name": name}, "spec": self.classes[name]}

    def namespace_labels(self, name: str) -> dict[str, str]:
        return self.labels.get(name, {})

    def namespaces(self, label: str) -> dict[str, dict[str, str]]:
        return {name: labels for name, labels in self.labels.items() if label in labels}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(pool())
    monkeypatch.setattr(cli, "KubeReader", lambda *_: found)
    monkeypatch.setenv("COLUMNS", "100")
    return found


def command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return cli.run(arguments, out, err), out.getvalue(), err.getvalue()


def answer(*arguments: str) -> Any:
    code, out, err = command(*arguments, "-o", "json")
    assert code == 0, err
    return json.loads(out)


def asked(document: Json) -> dict[str, Json]:
    return {step["question"]: step for step in document["steps"]}


SIGNALS = "Do its engines say what they do?"
PODS = "Do its pods run?"
MANIFEST = "Is the manifest valid, and its name free?"
PROMISED = "Were requests promised anything?"
MAY = "May clocks be set?"


# ------------------------------------------------------------------------------------------------ list and explanation


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
    trial = {"pod": "llama-a", "clockMegahertz": 1305, "why": "NearLimit"}
    cluster.stored_pools[0]["status"]["canary"] = trial
    cluster.stored_pools[0]["status"]["replicaCount"] = 5
    text = command("explain", "sp/llama")[1]
    assert "llama-a is measured at 1,305 MHz: the next lower clock would come too near to the limit" in text
    assert "and 2 more" in text


def test_every_word_of_the_law_is_explained() -> None:
    assert set(HELD) == {reason.value for reason in Held}


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


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_pool_that_saves_has_good_steps_alone(cluster: Cluster) -> None:
    document = answer("doctor", "llama")
    assert {step["finding"] for step in document["steps"]} == {"good"}
    assert document["verdict"].startswith("It saves 31.40% of a token's energy (28.10% to 34.60% with 95%")
    del cluster.stored_pools[0]["status"]["savings"]
    document = answer("doctor", "llama")
    assert "follow the load; what that saves is not measured yet" in document["verdict"]
    assert asked(document)["Is it known what is saved?"]["finding"] == "waiting"


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
    said = ("False", "NoLimits", no_limits().message)
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
        raise KubeError("not now")

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

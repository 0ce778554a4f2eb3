"""``kubectl perseus``: what it says of a job is what the solver's own simulation says, and what is missing is named."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.doubles.stored_objects import stored_object

from perseus_core import keys
from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import CannotAnswer, KubeConflict, KubeForbidden, KubeNotFound, KubeUnavailable
from perseus_operator.objects.values import ConfigMap, Json, StoredObject
from perseus_operator.plugin import cli
from perseus_operator.plugin.doctor import ADVICE, examine
from perseus_operator.plugin.job import load_job
from perseus_operator.plugin.plot import LEAST_WIDTH, Mark, draw
from perseus_operator.plugin.reports import explanation, frontier_document, plan_document
from perseus_operator.plugin.tables import Terminal, explanation_text, frontier_text, plan_text
from perseus_operator.solving.frontier import frontier_to_spec, open_frontier
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv

STAGES, PIPELINES, TENSOR = 2, 3, 2
CSV = profile_csv(STAGES, imbalance=1.2)
REQUEST = SolveRequest(CSV, "1f1b", STAGES, 4, None, 83_640, 20)
SPEC: Json = {
    "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": 4}
    | {"dataParallel": PIPELINES, "tensorParallel": TENSOR},
    "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83_640},
    "objective": {"type": "MaxSlowdown", "maxSlowdown": "5%"},
    "points": 20,
}
DIGEST = hashlib.sha256(b"inputs").hexdigest()


@pytest.fixture(scope="module")
def kept() -> StoredObject:
    solved = open_frontier(solve_in_process(REQUEST), REQUEST, digest=DIGEST, solve_ms=1, restored=False)
    spec = frontier_to_spec(solved)
    assert spec is not None
    return stored_object("gpt3", spec)


class Stored:
    """A cluster of one job; as the plugin reads it."""

    namespace = "team"

    def __init__(self, kept: StoredObject) -> None:
        frontier = {"digest": DIGEST, "points": 20}
        said = {"type": "PlanApplied", "status": "True", "reason": "PlanInForce", "message": "Point 1 of 20."}
        self.body: Json = {
            "metadata": {"name": "gpt3", "namespace": "team", "resourceVersion": "7"},
            "spec": SPEC,
            "status": {
                "frontier": frontier,
                "plan": {"point": 1, "fromIteration": 12, "plannedSlowdown": "2.38%"},
                "predicted": {"iterationTimeMicroseconds": 600_000, "energyMillijoules": 2_000_000},
                "measured": {"iterationTimeMicroseconds": 610_000, "energyMillijoules": 2_100_000, "iterations": 15},
                "baseline": {"iterationTimeMicroseconds": 600_000, "energyMillijoules": 3_000_000, "iterations": 3},
                "savings": {"energy": "30.00%", "slowdown": "1.67%", "against": "Baseline"},
                "conditions": [said],
            },
        }
        self.maps = {"profile": ConfigMap("profile", {"profile.csv": CSV}, {})}
        self.objects = {("perseusfrontiers", "gpt3"): kept}
        self.rivals = 0
        """Edits by others, still to come."""
        self.labels: dict[str, dict[str, str]] = {"team": {}, "other": {}}
        """Of each namespace."""
        self.classes: dict[str, Json] = {}
        """Specs of the EnergyClasses."""

    def job(self, namespace: str, name: str) -> Json:
        if (namespace, name) != ("team", "gpt3"):
            raise KubeNotFound(f'perseusjobs.perseus.energy "{name}" not found')
        return self.body

    def jobs(self, namespace: str | None) -> list[Json]:
        return [self.body] if namespace in (None, "team") else []

    def namespace_labels(self, name: str) -> dict[str, str]:
        return self.labels[name]

    def namespaces(self, label: str) -> dict[str, dict[str, str]]:
        return {name: labels for name, labels in self.labels.items() if label in labels}

    def energy_class(self, name: str) -> Json:
        if name not in self.classes:
            raise KubeNotFound(f'energyclasses.perseus.energy "{name}" not found')
        return {"metadata": {"name": name}, "spec": self.classes[name]}

    def config_map(self, namespace: str, name: str) -> ConfigMap:
        if name not in self.maps:
            raise KubeNotFound(f'configmaps "{name}" not found')
        return self.maps[name]

    def stored(self, plural: str, namespace: str, name: str) -> StoredObject:
        if (plural, name) not in self.objects:
            raise KubeNotFound(f'{plural} "{name}" not found')
        return self.objects[plural, name]

    def edit_annotation(self, namespace: str, name: str, key: str, edit: Callable[[Json, str], str]) -> str:
        annotations = self.body["metadata"].setdefault("annotations", {})
        annotations[key] = edit(self.body, annotations.get(key, ""))
        return str(annotations[key])


@pytest.fixture
def stored(kept: StoredObject, monkeypatch: pytest.MonkeyPatch) -> Stored:
    found = Stored(kept)
    monkeypatch.setattr(cli, "KubeReader", lambda *_: found)
    monkeypatch.setenv("COLUMNS", "80")
    return found


def command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return cli.run(arguments, out, err), out.getvalue(), err.getvalue()


# ------------------------------------------------------------------------------------------------------- documents


def test_the_frontier_is_that_of_the_whole_job_against_every_clock_at_maximum(stored: Stored) -> None:
    job = load_job(stored, "team", "gpt3")
    document = frontier_document(job)
    points, highest = document["points"], document["allAtMaximum"]
    assert len(points) == len(job.frontier)
    for point, solved in zip(points, job.frontier, strict=True):
        assert point["energyMillijoules"] == round(1000 * PIPELINES * TENSOR * solved.energy_j)
        assert point["powerWatts"] == round(PIPELINES * TENSOR * solved.energy_j / solved.iteration_time_s)
        assert float(point["saved"].rstrip("%")) == pytest.approx(
            100 * (1 - point["energyMillijoules"] / highest["energyMillijoules"]), abs=0.01
        )
    assert highest["iterationTimeMicroseconds"] == points[0]["iterationTimeMicroseconds"], "T_min costs no time"
    assert float(points[0]["saved"].rstrip("%")) > 1, "and saves"
    assert document["pointInForce"] == 1


def test_a_plan_names_every_instruction_and_counts_its_changes(stored: Stored) -> None:
    document = plan_document(load_job(stored, "team", "gpt3"), None)
    assert (document["point"], document["inForce"]) == (1, True)
    for stage in document["stages"]:
        kinds = [(i["kind"], i["microbatch"]) for i in stage["instructions"]]
        assert sorted(kinds) == [(kind, m) for kind in ("backward", "forward") for m in range(4)]
        assert all(0 < i["megahertz"] <= 1410 for i in stage["instructions"])
    assert sum(stage["clockChanges"] for stage in document["stages"]) == document["clockChanges"]
    assert plan_document(load_job(stored, "team", "gpt3"), 0)["inForce"] is False


def test_a_straggler_is_waited_for_in_what_a_plan_is_compared_with(stored: Stored) -> None:
    alone = explanation(load_job(stored, "team", "gpt3"))
    slow = {"dataParallelRank": 1, "slowdown": "20.00%", "source": "Declared", "point": 0}
    stored.body["status"]["stragglers"] = [slow]
    with_it = explanation(load_job(stored, "team", "gpt3"))
    before, after = (d["figures"]["all at maximum clocks"] for d in (alone, with_it))
    assert after["iterationTimeMicroseconds"] == pytest.approx(1.2 * before["iterationTimeMicroseconds"], abs=1)
    # Two pipelines wait for a fifth of an iteration, each stage of each tensor rank at blocking power.
    waiting_mj = 2 * TENSOR * STAGES * 83.640 * 0.2 * before["iterationTimeMicroseconds"] / 1e3
    assert after["energyMillijoules"] - before["energyMillijoules"] == pytest.approx(waiting_mj, rel=1e-6)
    said = {row["what"]: row["says"] for row in with_it["why"]}
    assert "pipeline 1 is 20.00% slower (declared)" in said["straggler"]
    assert "have until then" in said["straggler"]
    slow["slowdown"] = "900.00%"
    assert "slower saves nothing" in str(explanation(load_job(stored, "team", "gpt3"))["why"])


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"type": "MaxThroughput"}, "MaxThroughput: no slowdown"),
        ({"type": "MinEnergy"}, "MinEnergy: the least energy of all is at"),
        ({"type": "PowerCap", "powerCapWatts": 900}, "PowerCap: the fastest plan of at most 900 W"),
        ({"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 700_000}}, "an iteration may take 0.7 s"),
        (
            {"type": "Deadline", "deadline": {"finishBy": "2030-01-31T18:00:00Z", "iterations": 9}},
            "Deadline: 9 iterations by 2030-01-31T18:00:00Z",
        ),
    ],
)
def test_every_objective_is_described(stored: Stored, objective: Json, said: str) -> None:
    stored.body["spec"] = {**SPEC, "objective": objective}
    document = explanation(load_job(stored, "team", "gpt3"))
    assert said in document["why"][0]["says"]
    assert document["why"][0]["what"] == "objective"


def test_measured_is_measured_and_predicted_is_predicted(stored: Stored) -> None:
    saves = explanation(load_job(stored, "team", "gpt3"))["saves"]
    assert saves["measured"] == {"energy": "30.00%", "slowdown": "1.67%", "against": "measured at default clocks"}
    assert saves["predicted"]["against"] == "all at maximum clocks"
    del stored.body["status"]["savings"]
    assert "measured" not in explanation(load_job(stored, "team", "gpt3"))["saves"]


# ------------------------------------------------------------------------------------------------ what is missing


def test_a_profile_of_its_own_kind_is_read_with_its_calibrations(stored: Stored) -> None:
    stored.body["spec"] = {**SPEC, "profile": {"profileRef": {"name": "measured"}}}
    stored.objects["perseusprofiles", "measured"] = stored_object(
        "measured", {"csv": CSV}, {"calibrations": {"x": "{}"}}
    )
    assert "predicted" in explanation(load_job(stored, "team", "gpt3"))["saves"]
    stored.objects["perseusprofiles", "measured"] = stored_object("measured", {})
    found = frontier_text(frontier_document(load_job(stored, "team", "gpt3")), Terminal(), everything=False)
    assert "Note: the profile cannot be read from PerseusProfile measured" in found


def test_without_the_profile_all_but_names_and_comparison_is_shown(stored: Stored) -> None:
    for other in (None, ConfigMap("profile", {"profile.csv": profile_csv(STAGES, imbalance=1.1)}, {})):
        stored.maps.pop("profile", None)
        if other is not None:
            stored.maps["profile"] = other
        job = load_job(stored, "team", "gpt3")
        assert "saved" not in frontier_document(job)["points"][0]
        assert "Note: the profile" in frontier_text(frontier_document(job), Terminal(), everything=False)
        assert "predicted" not in explanation(job)["saves"]
        with pytest.raises(CannotAnswer, match="instructions cannot be named: the profile"):
            plan_document(job, 1)


def test_every_gap_is_one_line_with_its_reason(stored: Stored) -> None:
    status = stored.body["status"]
    for arguments, said in (
        (("frontier", "nope"), "there is no PerseusJob nope in namespace team"),
        (("frontier", "gpt3", "-n", "other"), "there is no PerseusJob gpt3 in namespace other"),
        (("plan", "gpt3", "--point", "99"), "--point: the frontier has points 0 to"),
        (
            ("straggler", "set", "gpt3", "--pipeline", "3", "--slowdown", "2"),
            "data-parallel ranks 0 to 2, not 3",
        ),
    ):
        assert command(*arguments)[0] == cli.REFUSED
        assert said in command(*arguments)[2]
        assert command(*arguments)[2].count("\n") == 1
    status["conditions"] = [
        {"type": "PlanApplied", "status": "False", "reason": "WaitingForRanks", "message": "1 of 6 have connected."}
    ]
    del status["plan"]
    assert "runs no plan: WaitingForRanks: 1 of 6 have connected." in command("plan", "gpt3")[2]
    assert command("frontier", "gpt3")[0] == 0, "a frontier is there all the same"

    stored.objects["perseusfrontiers", "gpt3"] = stored_object("gpt3", {"digest": "other"})
    assert "it is being replaced, try again" in command("frontier", "gpt3")[2]
    del stored.objects["perseusfrontiers", "gpt3"]
    assert "PerseusFrontier gpt3 does not exist" in command("frontier", "gpt3")[2]
    del status["frontier"]
    wrong = {"type": "ProfileReady", "status": "False", "reason": "KeyNotFound", "message": "no key p.csv"}
    status["conditions"] = [{"type": "Accepted", "status": "True"}, wrong]
    assert "gpt3 has no frontier yet: KeyNotFound: no key p.csv" in command("explain", "gpt3")[2]
    stored.body.pop("status")
    assert "no operator has reported on it yet" in command("explain", "gpt3")[2]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KubeUnavailable("the API server cannot be reached: refused"), cli.UNREACHABLE, "cannot be reached"),
        (KubeForbidden('User "eve" cannot get'), cli.REFUSED, 'access denied: User "eve" cannot get'),
        (KubeNotFound("the server could not find the requested resource"), cli.REFUSED, "is the chart installed?"),
    ],
)
def test_an_error_of_the_api_server_becomes_an_exit_code(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    def refuse(*_: str) -> Any:
        raise error

    monkeypatch.setattr(stored, "job", refuse)
    for arguments in (("explain", "gpt3"), ("straggler", "clear", "gpt3")):
        found, out, err = command(*arguments)
        assert (found, out) == (code, "")
        assert said in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("frontier",),
        ("straggler", "set", "gpt3", "--slowdown", "1.2"),
        ("straggler", "set", "gpt3", "--pipeline", "1"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--gpu", "GPU-a", "--slowdown", "2"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "0.9"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "fast"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2", "--delay", "3"),
        ("explain", "gpt3", "-o", "xml"),
    ],
)
def test_wrong_arguments_are_two(stored: Stored, arguments: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        command(*arguments)
    assert left.value.code == cli.USAGE
    assert "kubectl perseus" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ doctor and list


def conditions(**said: tuple[str, str]) -> list[Json]:
    return [
        {"type": kind, "status": status, "reason": reason, "message": f"{reason} is so."}
        for kind, (status, reason) in said.items()
    ]


HEALTHY = {
    "Accepted": ("True", "Accepted"),
    "ProfileReady": ("True", "ProfileRead"),
    "FrontierReady": ("True", "Solved"),
    "AgentsReady": ("True", "Leased"),
    "PlanApplied": ("True", "PlanInForce"),
    "BoundKept": ("True", "BoundKept"),
    "ModelExplains": ("True", "ModelExplains"),
    "StragglerDetected": ("False", "NoStraggler"),
}


def diagnosed(stored: Stored, **said: tuple[str, str]) -> dict[str, Json]:
    stored.body["status"]["conditions"] = conditions(**(HEALTHY | said))
    document = examine(stored.body)
    return {"verdict": document["verdict"], **{step["condition"]: step for step in document["steps"]}}


def test_a_healthy_job_has_good_steps_alone_and_its_savings(stored: Stored) -> None:
    found = diagnosed(stored)
    assert {step["finding"] for name, step in found.items() if name != "verdict"} == {"good"}
    assert found["verdict"] == "It saves 30.00% of the energy and is slower by 1.67%, as measured."
    del stored.body["status"]["savings"]
    assert "not measured yet" in diagnosed(stored)["verdict"]


@pytest.mark.parametrize(
    ("spec", "changed", "said"),
    [
        ({}, {"baseline": None}, "No iteration of this shape is measured at default clocks: once some have run"),
        ({}, {"baseline": None, "powerBudget": {"name": "hall-b", "watts": 300}}, "PowerBudget hall-b selects the job"),
        ({"baselineIterations": 0}, {"baseline": None}, "compared with default clocks at iteration 400"),
        (
            {"baselineIterations": 0, "comparison": {"everyIterations": 0}},
            {"baseline": None},
            "spec.baselineIterations and spec.comparison.everyIterations are 0",
        ),
        ({}, {"measured": None}, "Iterations under the plan are being measured."),
        ({}, {"measured": {"iterationTimeMicroseconds": 600_000}}, "some GPU has no energy counter"),
    ],
)
def test_the_doctor_knows_why_savings_are_not_measured(stored: Stored, spec: Json, changed: Json, said: str) -> None:
    status = stored.body["status"]
    del status["savings"]
    stored.body["spec"] = SPEC | spec
    stored.body["status"] = {name: value for name, value in (status | changed).items() if value is not None}
    verdict = diagnosed(stored)["verdict"]
    assert verdict.startswith("A plan is in force; what it saves is not measured yet. ")
    assert said in verdict


def test_the_first_fault_is_the_one_to_mend(stored: Stored) -> None:
    found = diagnosed(
        stored,
        ProfileReady=("False", "ProfileInvalid"),
        FrontierReady=("False", "WaitingForProfile"),
        PlanApplied=("False", "WaitingForFrontier"),
    )
    assert found["verdict"] == "It does not save: ProfileInvalid."
    assert found["ProfileReady"]["finding"] == "fault"
    assert found["ProfileReady"]["do"]
    assert found["AgentsReady"]["finding"] == "good", "what does not depend on it is examined all the same"
    assert {found[kind]["finding"] for kind in ("FrontierReady", "PlanApplied")} == {"unknown"}


def test_a_budget_that_slows_a_job_is_named_with_what_it_costs(stored: Stored) -> None:
    stored.body["status"]["powerBudget"] = {"name": "hall-b", "watts": 300, "slowdown": "52.07%"}
    found = diagnosed(stored, PlanApplied=("True", "LimitedByBudget"))
    assert found["verdict"].endswith("It is slowed by PowerBudget hall-b by 52.07%.")
    assert found["PlanApplied"]["finding"] == "note"
    assert "raise the PowerBudget's spec.watts" in found["PlanApplied"]["do"]
    assert found["BoundKept"]["finding"] == "good", "nothing waits for it"
    out = command("doctor", "gpt3")[1]
    assert [line.split()[0] for line in out.splitlines() if line.endswith("Is a plan in force?")] == ["!"]
    assert "LimitedByBudget is so." in out
    assert command("list")[1].splitlines()[1].endswith(", slowed by PowerBudget hall-b by 52.07%")


def test_a_failed_pod_of_a_class_is_the_fault_of_no_other_step(stored: Stored) -> None:
    stored.body["spec"] = {name: value for name, value in SPEC.items() if name != "pipeline"}
    stored.body["metadata"]["labels"] = {keys.LABEL_CLASS: "default"}
    found = diagnosed(
        stored,
        ProfileReady=("Unknown", "NoPods"),
        FrontierReady=("Unknown", "WaitingForProfile"),
        AgentsReady=("False", "NoPods"),
        PlanApplied=("False", "NoPods"),
    )
    assert found["verdict"] == "It does not save: NoPods."
    findings = {kind: step["finding"] for kind, step in found.items() if kind != "verdict"}
    assert [kind for kind, finding in findings.items() if finding in ("fault", "waiting")] == ["AgentsReady"]
    assert found["AgentsReady"]["do"].startswith("if a pod failed, read its log")
    assert "label the pod template" not in str(found), "it opted in by its class"


def test_a_step_that_ends_by_itself_is_no_fault(stored: Stored) -> None:
    found = diagnosed(stored, PlanApplied=("False", "MeasuringBaseline"))
    assert found["PlanApplied"]["finding"] == "waiting"
    assert found["verdict"].startswith("It waits")


def test_a_job_that_no_operator_has_seen(stored: Stored) -> None:
    stored.body["status"] = {}
    assert "No operator has reported" in examine(stored.body)["verdict"]
    stored.body["metadata"]["generation"] = 3
    stored.body["status"] = {"observedGeneration": 2, "conditions": conditions(**HEALTHY)}
    assert "has not seen the latest edit" in examine(stored.body)["verdict"]


def test_every_reason_that_keeps_a_job_from_saving_has_advice() -> None:
    fine = {
        *("Accepted", "ProfileRead", "Solved", "Restored", "Leased", "PlanInForce", "NoStraggler"),
        *("StragglersIgnored", "ModelExplains", "BoundKept", "NoBound", "Ready"),
        *("Running", "NotSuspended", "NotFinished", "ClockInForce"),
        *("SignalsSeen", "ProfileFitted", "TableInForce", "ObjectiveKept"),
    }
    events = {
        "StragglerRecovered",
        "PlanRetried",
        "PlanChanged",
        "BaselineMeasured",
        "BaselineDiscarded",
        "ClocksReleased",
    }
    assert {reason.value for reason in ADVICE} == {reason.value for reason in Reason} - fine - events


def test_the_doctor_says_what_to_do(stored: Stored) -> None:
    diagnosed(stored, AgentsReady=("False", "NoAgent"))
    code, out, _ = command("doctor", "gpt3")
    assert code == 0
    assert "do: let the agents' DaemonSet run on that node" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_list_adds_up_what_is_measured(stored: Stored) -> None:
    code, out, _ = command("list", "-o", "json")
    assert code == 0
    document = json.loads(out)
    (job,) = document["jobs"]
    # 3,000 J in 0.6 s before, 2,100 J in 0.61 s now.
    assert job["savedWatts"] == document["savedWatts"] == round(3000 / 0.6 - 2100 / 0.61)
    assert (job["energy"], job["state"]) == ("30.00%", "NotSeen")
    assert "1,557 W are saved by the 1 job measured so far." in command("list", "-A")[1]
    del stored.body["status"]["savings"]
    assert json.loads(command("list", "-o", "json")[1])["measured"] == 0
    interval = {"energySaved": "10.00%", "energySavedLow": "8.00%", "energySavedHigh": "22.00%"}
    stored.body["status"]["advised"] = {**interval, "restsOn": "Model"}
    assert "8.00% to 22.00% (Model)" in command("list", "-A")[1]
    assert command("list", "-n", "other")[1] == "there is no PerseusJob in namespace other\n"


ASKS = "namespace other asks for EnergyClass default, which does not exist"


def test_a_namespace_whose_class_does_not_exist_learns_it_where_it_looks(stored: Stored) -> None:
    stored.labels["other"] = {keys.LABEL_CLASS: "default"}
    first, says, do = command("list", "-n", "other")[1].splitlines()
    assert first == "there is no PerseusJob in namespace other"
    assert says == ASKS
    assert "webhook.enabled" in do
    code, _, err = command("doctor", "train", "-n", "other")
    assert code == cli.REFUSED
    assert err.startswith(f"kubectl perseus: there is no PerseusJob train in namespace other: {ASKS}")
    everywhere = command("list", "-A")[1]
    assert "gpt3" in everywhere
    assert ASKS in everywhere
    assert json.loads(command("list", "-A", "-o", "json")[1])["classes"][0]["applied"] is False


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"mode": "Force"}, "which is invalid: spec.mode: must be one of"),
        ({"namespaceSelector": {"matchLabels": {"tier": "gold"}}}, "which is not for namespace other: see its"),
    ],
    ids=["invalid", "not for the namespace"],
)
def test_the_list_says_why_a_class_is_not_applied_in_the_words_of_the_event(
    stored: Stored, spec: Json, said: str
) -> None:
    stored.labels["other"] = {keys.LABEL_CLASS: "default"}
    stored.classes["default"] = spec
    assert f"asks for EnergyClass default, {said}" in command("list", "-n", "other")[1]
    assert f"asks for EnergyClass default, {said}" in command("list", "-A")[1]


def test_of_a_class_that_is_applied_only_a_namespace_without_jobs_hears(stored: Stored) -> None:
    stored.classes["default"] = {}
    stored.labels |= {"other": {keys.LABEL_CLASS: "default"}, "team": {keys.LABEL_CLASS: "default"}}
    assert "a PerseusJob is made when pods of a training workload run" in command("list", "-n", "other")[1]
    for arguments in (("list",), ("list", "-A")):
        assert "EnergyClass" not in command(*arguments)[1]
    stored.labels["other"] = {keys.LABEL_CLASS: "none"}
    assert command("list", "-n", "other")[1] == "there is no PerseusJob in namespace other\n"


def test_who_may_read_neither_namespaces_nor_classes_is_answered_all_the_same(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> Any:
        raise KubeForbidden('User "eve" cannot get')

    stored.labels["other"] = {keys.LABEL_CLASS: "default"}
    monkeypatch.setattr(stored, "energy_class", refuse)
    assert "asks for EnergyClass default, which you may not read" in command("list", "-n", "other")[1]
    monkeypatch.setattr(stored, "namespace_labels", refuse)
    monkeypatch.setattr(stored, "namespaces", refuse)
    assert command("list", "-n", "other")[1] == "there is no PerseusJob in namespace other\n"
    assert command("list", "-A")[0] == 0


def test_without_a_command_the_commands_are_listed(stored: Stored, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        command()
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in ("frontier", "plan", "explain"))


# ---------------------------------------------------------------------------------------------------- stragglers


def annotation(stored: Stored) -> str:
    return str(stored.body["metadata"].get("annotations", {}).get(keys.ANNOTATION_STRAGGLER, ""))


def test_stragglers_are_declared_and_cleared(stored: Stored) -> None:
    declare = ("straggler", "set", "gpt3", "--slowdown", "1.2")
    assert command(*declare, "--pipeline", "1")[1] == "pipeline 1 of team/gpt3 takes 1.2 times as long\n"
    assert command(*declare, "--gpu", "GPU-ab", "--delay", "30s")[1].endswith("takes 1.2 times as long in 30 s\n")
    assert annotation(stored) == "1:0:1.2,GPU-ab:30:1.2"
    command(*declare, "--pipeline", "2", "--delay", "10it")
    assert annotation(stored).endswith(",2:6.1:1.2"), "ten iterations as they are measured"
    assert "back to normal" in command("straggler", "clear", "gpt3", "--pipeline", "1")[1]
    assert "was not declared slow" in command("straggler", "clear", "gpt3", "--pipeline", "1")[1]
    assert annotation(stored) == "GPU-ab:30:1.2,2:6.1:1.2"
    assert json.loads(command("straggler", "clear", "gpt3", "-o", "json")[1])["stragglers"] == []
    assert annotation(stored) == ""


def test_a_delay_in_iterations_needs_to_know_what_one_takes(stored: Stored) -> None:
    for name in ("measured", "predicted", "baseline"):
        del stored.body["status"][name]
    code, _, err = command("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2", "--delay", "5it")
    assert (code, annotation(stored)) == (cli.REFUSED, "")
    assert "give seconds, such as 30s" in err


def test_an_invalid_annotation_is_not_edited_but_can_be_cleared(stored: Stored) -> None:
    stored.body["metadata"]["annotations"] = {keys.ANNOTATION_STRAGGLER: "soon"}
    code, _, err = command("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2")
    assert (code, annotation(stored)) == (cli.REFUSED, "soon")
    assert "not 'soon'" in err
    assert command("straggler", "clear", "gpt3")[0] == 0
    assert annotation(stored) == ""


def test_a_job_that_ignores_stragglers_says_so(stored: Stored) -> None:
    stored.body["spec"] = {**SPEC, "straggler": {"mode": "Ignore"}}
    assert "the operator ignores it" in command("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2")[1]


def test_concurrent_edits_are_not_lost(monkeypatch: pytest.MonkeyPatch, stored: Stored) -> None:
    from perseus_operator.plugin.kube_client import KubeReader

    cluster = object.__new__(KubeReader)
    writes: list[Json] = []

    def patch(namespace: str, name: str, body: Json) -> None:
        if len(writes) < 2:
            stored.body["metadata"] = {"resourceVersion": f"8{len(writes)}", "annotations": {"key": f"{len(writes)}"}}
            writes.append(body)
            raise KubeConflict("the object has been modified")
        writes.append(body)

    monkeypatch.setattr(cluster, "job", stored.job, raising=False)
    monkeypatch.setattr(cluster, "_patch", patch, raising=False)
    assert cluster.edit_annotation("team", "gpt3", "key", lambda _, before: f"{before}+mine") == "1+mine"
    assert [w["metadata"]["resourceVersion"] for w in writes] == ["7", "80", "81"]
    assert writes[-1]["metadata"]["annotations"] == {"key": "1+mine"}


# --------------------------------------------------------------------------------------------------- how it looks


def test_the_three_formats_hold_the_same_figures(stored: Stored) -> None:
    for name in ("frontier", "plan", "explain"):
        as_json = json.loads(command(name, "gpt3", "-o", "json")[1])
        assert yaml.safe_load(command(name, "gpt3", "-o", "yaml")[1]) == as_json
        assert as_json["job"] == "team/gpt3"
        assert "team/gpt3" in command(name, "gpt3")[1]


def test_nothing_but_text_goes_into_a_pipe_and_no_line_is_wider_than_the_terminal(stored: Stored) -> None:
    job = load_job(stored, "team", "gpt3")
    for width in (60, 80, 200):
        for colour in (False, True):
            terminal = Terminal(width, colour=colour, fancy=False)
            for text in (
                plan_text(plan_document(job, None), terminal, everything=False),
                explanation_text(explanation(job), terminal),
            ):
                plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "")
                assert (plain == text) is not colour
                assert max(map(len, plain.splitlines())) <= max(width, 76)
                plain.encode("ascii")
    document = frontier_document(job)
    assert "\x1b" not in frontier_text(document, Terminal(80, colour=False), everything=False)
    assert "\x1b[32m*" in frontier_text(document, Terminal(80, colour=True), everything=False)
    frontier_text(document, Terminal(80, fancy=False), everything=True).encode("ascii")


def test_a_long_frontier_is_thinned_but_never_its_ends_or_the_plan_in_force(stored: Stored) -> None:
    job = load_job(stored, "team", "gpt3")
    document = frontier_document(job)
    count = len(document["points"])
    document["pointInForce"] = 7
    for everything in (False, True):
        table = frontier_text(document, Terminal(), everything=everything).split("POINT")[1].splitlines()[1:]
        numbers = [int(line.lstrip("* ").split()[0]) for line in table if " W " in line]
        assert {0, 7, count - 1} <= set(numbers)
        assert (numbers == list(range(count))) is (everything or count <= 16)


@pytest.mark.parametrize("fancy", [True, False])
@pytest.mark.parametrize("width", [10, 40, 81, 300])
def test_a_plot_falls_where_the_curve_falls_and_shows_its_marks(width: int, fancy: bool) -> None:
    curve = [(1.0 + i / 50, 1000 / (1 + i / 10)) for i in range(50)]
    lines = draw(curve, [Mark(*curve[0], "A", "a"), Mark(*curve[-1], "B", "b")], width=width, fancy=fancy)
    assert max(map(len, lines)) <= max(width, LEAST_WIDTH)
    first, last = ("A", "B") if fancy else ("a", "b")
    assert first in lines[0]
    row = next(i for i, line in enumerate(lines) if last in line)
    assert row == len(lines) - 3
    assert lines[row].index(last) == max(len(line) for line in lines[:-2]) - 1
    assert lines[0].strip().startswith("1000")
    assert lines[-1].split() == ["1", "1.98"]


def test_a_frontier_of_one_point_can_be_drawn() -> None:
    assert any("x" in line for line in draw([(1.0, 2.0)], [Mark(1.0, 2.0, "x", "x")], width=50, fancy=True))


def test_the_spec_of_these_tests_is_one() -> None:
    assert parse_spec(JobSpec, SPEC).pipeline.data_parallel == PIPELINES


# -------------------------------------------------------------------------------------------------------- how it starts


def test_it_starts_without_what_only_the_operator_needs() -> None:
    """Each of them takes a good part of a second to import, several on a busy machine."""
    heavy = {"aiohttp", "kubernetes.aio", "kopf", "ortools", "grpc", "matplotlib", "prometheus_client"}
    code = f"import sys, perseus_operator.plugin.cli; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_it_reads_objects_without_the_models_of_every_kind(tmp_path: Path) -> None:
    kept = {
        "metadata": {"name": "profile", "uid": "u"},
        "data": {"a": "b"},
        "binaryData": {"c": "AAE="},
    }
    team = {"metadata": {"name": "team", "labels": {keys.LABEL_CLASS: "frugal"}}}
    answers = {
        "/api/v1/namespaces/team/configmaps/profile": kept,
        "/api/v1/namespaces/team": team,
        "/api/v1/namespaces?labelSelector=perseus.energy/class": {"items": [team]},
        "/apis/perseus.energy/v1alpha1/energyclasses/frugal": {"spec": {}},
    }

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            answer = json.dumps(found or {"message": f"no {self.path}"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    code = """
import sys
from perseus_operator.errors import KubeNotFound
from perseus_operator.plugin.kube_client import KubeReader
cluster = KubeReader(sys.argv[1], None)
print(cluster.config_map("team", "profile"))
try:
    cluster.config_map("team", "another")
except KubeNotFound as error:
    print(error)
print(cluster.namespace_labels("team"), cluster.namespaces("perseus.energy/class"))
print(cluster.energy_class("frugal"))
print("kubernetes.client.models.v1_pod" in sys.modules)
"""
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever).start()
        cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
        context = {"cluster": "c", "user": "u"}
        kubeconfig = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
        command = [sys.executable, "-c", code, str(tmp_path / "kubeconfig")]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            server.shutdown()
    assert found.stderr == ""
    assert found.stdout.splitlines() == [
        str(ConfigMap("profile", {"a": "b"}, {"c": b"\0\1"}, "u")),
        "no /api/v1/namespaces/team/configmaps/another",
        "{'perseus.energy/class': 'frugal'} {'team': {'perseus.energy/class': 'frugal'}}",
        "{'spec': {}}",
        "False",
    ]


def test_a_kubeconfig_without_an_address_is_one_line(tmp_path: Path) -> None:
    """Found beside robusta-dev/krr issue 170: the client of Kubernetes raised ValueError."""
    file = tmp_path / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": "http://[::1:1"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    err = io.StringIO()
    assert cli.run(["list", "--kubeconfig", str(file)], io.StringIO(), err) == cli.UNREACHABLE
    assert err.getvalue().startswith("kubectl perseus: no usable kubeconfig: server: ")
    assert len(err.getvalue().splitlines()) == 1


CONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: %s, env: null}}}]
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{ this is: [no yaml", "it is no YAML: while parsing"),
        ("- a\n- b\n", "it is none: "),
        ("hello\n", "it is none: "),
        ("", "is empty"),
        (CONFIG % "no-such-plugin", "No such file or directory: 'no-such-plugin'"),
        (CONFIG % "'true'", "exec: failed to decode process output"),
        ("contexts: null\nusers: null\nclusters: null\n", "Invalid kube-config file"),
    ],
)
def test_what_is_no_kubeconfig_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    """Source: kubernetes-client/python issues 236, 637 and 2219, powerfulseal/powerfulseal issue 283, and
    ansible-collections/community.kubernetes pull request 119.
    """
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    err = io.StringIO()
    assert cli.run(["list", "--kubeconfig", str(file)], io.StringIO(), err) == cli.UNREACHABLE
    assert err.getvalue().startswith("kubectl perseus: no usable kubeconfig: ")
    assert message in err.getvalue()
    assert len(err.getvalue().splitlines()) == 1
    assert cli.run(["list", "--kubeconfig", str(tmp_path)], io.StringIO(), err) == cli.UNREACHABLE
    assert "Is a directory" in err.getvalue()

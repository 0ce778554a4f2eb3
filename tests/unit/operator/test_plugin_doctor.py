"""``kubectl perseus doctor`` and ``list``: what keeps jobs from saving, in the order in which to mend it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.doubles.plugin_job import (
    SPEC,
    Stored,
    command,
)

from perseus_core import keys
from perseus_operator.api.conditions import Reason
from perseus_operator.errors import KubeForbidden
from perseus_operator.objects.values import Json
from perseus_operator.plugin import cli
from perseus_operator.plugin.doctor import ADVICE, examine


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


def test_pods_that_are_missing_are_said_while_plans_are_being_made(stored: Stored) -> None:
    waits = {"FrontierReady": ("False", "Solving"), "PlanApplied": ("False", "WaitingForFrontier")}
    found = diagnosed(stored, AgentsReady=("False", "PodsTaken"), **waits)
    assert found["verdict"] == "It does not save: PodsTaken."
    assert found["FrontierReady"]["finding"] == "waiting"
    assert found["PlanApplied"]["finding"] == "unknown"


def test_a_profile_that_is_to_be_measured_is_not_what_a_job_without_pods_waits_for(stored: Stored) -> None:
    waits = {"ProfileReady": ("False", "Profiling"), "FrontierReady": ("False", "WaitingForProfile")}
    found = diagnosed(stored, AgentsReady=("False", "PodsTaken"), **waits)
    assert {found[kind]["finding"] for kind in waits} == {"unknown"}
    assert found["AgentsReady"]["finding"] == "fault"
    assert diagnosed(stored, **waits)["ProfileReady"]["finding"] == "waiting", "while its pods run it is"


def test_a_job_that_saves_does_so_beside_an_edit_that_is_refused(stored: Stored) -> None:
    found = diagnosed(stored, Accepted=("False", "AnnotationInvalid"))
    assert found["verdict"].startswith("It saves 30.00% of the energy")
    assert found["verdict"].endswith(" An edit is refused: AnnotationInvalid.")
    assert found["Accepted"]["finding"] == "fault"
    del stored.body["status"]["plan"]
    assert diagnosed(stored, Accepted=("False", "SpecInvalid"))["verdict"] == "It does not save: SpecInvalid."


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
        *("SignalsSeen", "ProfileFitted", "TableInForce", "ObjectiveKept", "NoForeignControl"),
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
    stored.body["status"]["advised"]["energySavedLow"] = "22.00%"
    assert "  22.00% (Model)" in command("list", "-A")[1], "no interval of one value"
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
    assert err.startswith(f"kubectl perseus: there is no PerseusJob or ServingPool train in namespace other: {ASKS}")
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


def pod(name: str, job: str, energy_class: str, phase: str = "Running", **annotations: str) -> Json:
    labels = {keys.LABEL_JOB: job, keys.LABEL_CLASS: energy_class}
    metadata = {"name": name, "namespace": "other", "uid": name, "labels": labels, "annotations": annotations}
    return {"metadata": metadata, "spec": {"nodeName": "a"}, "status": {"phase": phase}}


def test_pods_that_ask_for_a_class_by_their_own_label_are_seen_where_one_looks(stored: Stored) -> None:
    stored.classes["frugal"] = {}
    stored.stored_pods["other"] = [pod("a", "first", "gold"), pod("b", "first", "gold"), pod("c", "late", "frugal")]
    said = "pod a and 1 other pod of its namespace at default clocks: it asks for EnergyClass gold, which does not"
    first, says, do = command("list", "-n", "other")[1].splitlines()
    assert first == "there is no PerseusJob in namespace other"
    assert says.startswith(said)
    assert "kubectl get energyclasses" in do
    assert said in command("doctor", "first", "-n", "other")[2]
    assert said.replace("pod a", "pod other/a") in command("list", "-A")[1]
    stored.stored_pods["other"] = [pod("a", "x", "frugal", **{keys.ANNOTATION_PROFILE: "No Name"})]
    assert f"pod a at default clocks: its annotation {keys.ANNOTATION_PROFILE}" in command("list", "-n", "other")[1]
    stored.stored_pods["other"] = [pod("a", "first", "gold", "Failed")]
    assert "gold" not in command("list", "-n", "other")[1], "it runs no more"


def test_pods_are_not_named_whose_namespace_says_it_or_whose_job_exists(stored: Stored) -> None:
    stored.labels["other"] = {keys.LABEL_CLASS: "gold"}
    stored.stored_pods["other"] = [pod("a", "first", "gold")]
    for arguments in (("list", "-n", "other"), ("list", "-A")):
        assert command(*arguments)[1].count("EnergyClass gold") == 1
    own = pod("a", "gpt3", "gold")
    own["metadata"]["namespace"] = "team"
    stored.stored_pods["team"] = [own]
    assert "EnergyClass gold" not in command("list")[1], "a user wrote the job that they name"


def test_a_job_whose_pods_belong_to_another_one_is_told_what_to_do(stored: Stored) -> None:
    stored.body["spec"] = {**SPEC}
    step = diagnosed(stored, AgentsReady=("False", "PodsTaken"))["AgentsReady"]
    assert (step["reason"], step["do"]) == ("PodsTaken", "edit or delete one of the two PerseusJobs")

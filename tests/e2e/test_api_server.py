"""PerseusJob on an API server: what the server accepts, refuses, sets by default and shows. No operator runs here.

The behaviour of servers for any resource (conflicts, watches, patches, finalizers) is tested in
tests/integration/test_apiserver.py, which ``test_stand_in`` runs on the real server too.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from perseus_core import keys
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.errors import InvalidSpec
from perseus_sim.cluster.api_servers import Feature, Server

pytestmark = [pytest.mark.e2e, pytest.mark.on_both]

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "perseusjob.yaml"
MINIMAL: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": 4, "microbatches": 12},
    "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83640},
}
ABSENT = "(absent)"


def edited(changes: dict[str, Any]) -> dict[str, Any]:
    """The minimal spec with some fields set, or ABSENT, by their dotted paths."""
    spec = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ABSENT:
            del place[last]
        else:
            place[last] = value
    return spec


class Jobs:
    """PerseusJobs in one namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.custom = client.CustomObjectsApi(api)
        self.place = (keys.API_GROUP, keys.API_VERSION, namespace, keys.PLURAL)

    def create(self, spec: Any, name: str = "job", **options: Any) -> dict[str, Any]:
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        body = {"apiVersion": api_version, "kind": keys.KIND, "metadata": {"name": name}, "spec": spec}
        return self.custom.create_namespaced_custom_object(*self.place, body, field_validation="Strict", **options)

    def patch(self, patch: dict[str, Any], name: str = "job") -> dict[str, Any]:
        return self.custom.patch_namespaced_custom_object(
            *self.place, name, patch, _content_type="application/merge-patch+json"
        )

    def patch_status(self, status: dict[str, Any], name: str = "job") -> dict[str, Any]:
        return self.custom.patch_namespaced_custom_object_status(
            *self.place, name, {"status": status}, _content_type="application/merge-patch+json"
        )

    def get(self, name: str = "job") -> dict[str, Any]:
        return self.custom.get_namespaced_custom_object(*self.place, name)

    def refusal(self, spec: Any, **options: Any) -> str | None:
        """Return why the server refuses a new job; None if it accepts it. The job is not created."""
        try:
            self.create(spec, dry_run="All", **options)
        except ApiException as error:
            if error.status not in (400, 422):
                raise
            return str(json.loads(error.body)["message"])
        return None


@pytest.fixture
def jobs(api: Any, crd: Any, namespace: str) -> Jobs:
    return Jobs(api, namespace)


def parser_refusal(spec: Any) -> str | None:
    """Return why the operator's parser refuses a spec; None if it accepts it."""
    try:
        parse_spec(JobSpec, spec)
    except InvalidSpec as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------------- the definition


def test_the_definition_is_established(crd: Any) -> None:
    conditions = {c.type: c.status for c in crd.status.conditions}
    assert conditions["NamesAccepted"] == "True"
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"
    assert crd.status.accepted_names.short_names == [keys.SHORT_NAME]


def test_the_sample_is_accepted(jobs: Jobs) -> None:
    sample = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
    assert jobs.create(sample["spec"], sample["metadata"]["name"])["metadata"]["generation"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": {}, "straggler": {}},
        {"straggler.slowdownThreshold": "7.5%"},
        {"objective": {"type": "FixedClock", "clockMegahertz": 900}, "pipeline": ABSENT, "profile": ABSENT},
    ],
    ids=str,
)
def test_server_and_operator_set_the_same_defaults(jobs: Jobs, changes: dict[str, Any]) -> None:
    spec = edited(changes)
    assert jobs.create(spec)["spec"] == dump(parse_spec(JobSpec, spec))


# --------------------------------------------------------------------------------------------- what is refused

SCHEMA = [
    ({"pipeline.stages": ABSENT}, "spec.pipeline.stages", "Required value"),
    ({"pipeline.stages": 0}, "spec.pipeline.stages", "should be greater than or equal to 1"),
    ({"pipeline.stages": "4"}, "spec.pipeline.stages", "must be of type integer"),
    ({"pipeline.microbatches": 65537}, "spec.pipeline.microbatches", "should be less than or equal to 65536"),
    ({"pipeline.schedule": "1f1b"}, "spec.pipeline.schedule", 'supported values: "1F1B"'),
    ({"profile.configMapRef.name": "Not_A_Name"}, "spec.profile.configMapRef.name", "should match"),
    ({"profile.blockingPowerMilliwatts": -1}, "spec.profile.blockingPowerMilliwatts", "greater than or equal to 0"),
    ({"objective": {"type": "Cheapest"}}, "spec.objective.type", 'supported values: "MaxThroughput"'),
    ({"objective": {"type": "MaxSlowdown", "maxSlowdown": "3"}}, "spec.objective.maxSlowdown", "should match"),
    ({"workload": {"selector": {"matchLabels": {}}}}, "spec.workload.selector.matchLabels", "at least 1 properties"),
    ({"mode": "enforce"}, "spec.mode", 'supported values: "Enforce", "Canary", "Recommend", "Observe"'),
    ({"points": 1}, "spec.points", "should be greater than or equal to 2"),
    ({"microbatches": 12}, "spec.microbatches", "unknown field"),
]

ONLY_FOR = "{} must be set if and only if type is {}"
NOT_FIXED = "{} must not be set with objective.type FixedClock"
FIXED = {"type": "FixedClock", "clockMegahertz": 900}
RULES = [
    ({"objective": FIXED, "pipeline": ABSENT}, "spec", NOT_FIXED.format("profile")),
    ({"objective": FIXED, "profile": ABSENT}, "spec", NOT_FIXED.format("pipeline")),
    ({"objective": {"type": "FixedClock"}}, "spec.objective", ONLY_FOR.format("clockMegahertz", "FixedClock")),
    ({"objective": {"type": "MaxSlowdown"}}, "spec.objective", ONLY_FOR.format("maxSlowdown", "MaxSlowdown")),
    ({"objective": {"maxSlowdown": "3%"}}, "spec.objective", ONLY_FOR.format("maxSlowdown", "MaxSlowdown")),
    ({"objective": {"type": "PowerCap"}}, "spec.objective", ONLY_FOR.format("powerCapWatts", "PowerCap")),
    ({"objective": {"type": "Deadline"}}, "spec.objective", ONLY_FOR.format("deadline", "Deadline")),
    (
        {"objective": {"type": "Deadline", "deadline": {}}},
        "spec.objective.deadline",
        "exactly one of iterationTimeMicroseconds and finishBy must be set",
    ),
    (
        {"objective": {"type": "Deadline", "deadline": {"finishBy": "2030-01-31T18:00:00Z"}}},
        "spec.objective.deadline",
        "finishBy and iterations must be set together",
    ),
    ({"straggler": {"slowdownThreshold": "2%"}}, "spec.straggler", "recoveryThreshold must be below slowdownThreshold"),
]


@pytest.mark.parametrize(
    ("changes", "field", "message"), SCHEMA, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_the_schema_refuses_and_names_the_field(jobs: Jobs, changes: dict[str, Any], field: str, message: str) -> None:
    refusal = jobs.refusal(edited(changes))
    assert refusal is not None
    assert field in refusal
    assert message in refusal


@pytest.mark.needs(Feature.CEL)
@pytest.mark.parametrize(
    ("changes", "field", "message"), RULES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_rule_across_fields_refuses_with_its_message(
    jobs: Jobs, changes: dict[str, Any], field: str, message: str
) -> None:
    refusal = jobs.refusal(edited(changes))
    assert refusal is not None
    assert f"{field}: Invalid value" in refusal
    assert message in refusal


@pytest.mark.needs(Feature.CEL)
@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline.stages": 5},
        {"pipeline.schedule": "GPipe"},
        {"pipeline.tensorParallel": 2},
        {"pipeline.schedule": None, "pipeline.scheduleRef": {"name": "other"}},
        {"pipeline.schedule": "FromRanks", "pipeline.microbatches": None},
    ],
    ids=str,
)
def test_the_running_pipeline_cannot_be_edited(jobs: Jobs, changes: dict[str, Any]) -> None:
    jobs.create(MINIMAL)
    with pytest.raises(ApiException) as refused:
        jobs.patch({"spec": edited(changes)})
    assert refused.value.status == 422
    assert "is immutable: the training processes run this pipeline" in json.loads(refused.value.body)["message"]
    assert jobs.get()["metadata"]["generation"] == 1


@pytest.mark.needs(Feature.CEL)
def test_a_job_stays_planned_or_at_a_fixed_clock(jobs: Jobs) -> None:
    jobs.create({})
    with pytest.raises(ApiException) as refused:
        jobs.patch({"spec": {"objective": FIXED}})
    assert "whether a job is planned or runs at a fixed clock is immutable" in json.loads(refused.value.body)["message"]


@pytest.mark.needs(Feature.CEL)
@pytest.mark.parametrize(("before", "after"), [({}, MINIMAL), (MINIMAL, {"pipeline": None})], ids=["set", "removed"])
def test_a_shape_can_be_neither_set_nor_removed_later(
    jobs: Jobs, before: dict[str, Any], after: dict[str, Any]
) -> None:
    jobs.create(before)
    with pytest.raises(ApiException) as refused:
        jobs.patch({"spec": after})
    assert "pipeline can be neither set nor removed later" in json.loads(refused.value.body)["message"]


def test_fields_that_may_change_while_the_job_runs_can_be_edited(jobs: Jobs) -> None:
    jobs.create(MINIMAL)
    changes = {
        "pipeline.dataParallel": 3,
        "objective.type": "MinEnergy",
        "straggler.mode": "Ignore",
        "mode": "Recommend",
    }
    assert jobs.patch({"spec": edited(changes)})["metadata"]["generation"] == 2


@pytest.mark.needs(Feature.CEL)
def test_a_name_too_long_for_a_label_is_refused(jobs: Jobs) -> None:
    assert jobs.refusal(MINIMAL, name="j" * 63) is None
    refusal = jobs.refusal(MINIMAL, name="j" * 64)
    assert refusal is not None
    assert "metadata.name must be at most 63 characters" in refusal


FIELDS = [
    "pipeline.schedule",
    "pipeline.stages",
    "pipeline.dataParallel",
    "profile.configMapRef",
    "profile.configMapRef.key",
    "profile.blockingPowerMilliwatts",
    "objective.type",
    "objective.maxSlowdown",
    "objective.powerCapWatts",
    "objective.deadline",
    "objective.deadline.iterationTimeMicroseconds",
    "objective.deadline.finishBy",
    "objective.deadline.iterations",
    "workload",
    "straggler.mode",
    "straggler.slowdownThreshold",
    "straggler.recoveryThreshold",
    "straggler.confirmIterations",
    "mode",
    "points",
    "baselineIterations",
    "unknown",
]
VALUES = [
    ABSENT,
    None,
    0,
    1,
    2.5,
    65537,
    True,
    "",
    "3%",
    "5%",
    "2.5 %",
    "1000%",
    "1F1B",
    "Ignore",
    "Deadline",
    "PowerCap",
]
VALUES += ["2030-01-31T18:00:00Z", "2030-02-31T18:00:00Z", [], {}]


@pytest.mark.needs(Feature.CEL)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=4))
def test_server_and_operator_agree_on_every_spec(jobs: Jobs, edits: dict[str, Any]) -> None:
    spec = copy.deepcopy(MINIMAL)
    for path, value in edits.items():
        *parents, last = path.split(".")
        place: Any = spec
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
            if value is not ABSENT:
                place[last] = copy.deepcopy(value)
    by_server, by_operator = jobs.refusal(spec), parser_refusal(spec)
    assert (by_server is None) == (by_operator is None), f"server: {by_server}; operator: {by_operator}"


# ---------------------------------------------------------------------------------------------- status and columns


def condition(kind: str, status: str = "True", reason: str = "PlanInForce") -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2030-01-31T18:00:00Z",
    }


def test_only_the_status_subresource_changes_the_status(jobs: Jobs) -> None:
    jobs.create(MINIMAL)
    assert "status" not in jobs.patch({"status": {"observedGeneration": 9}})
    after = jobs.patch_status({"observedGeneration": 1, "conditions": [condition("Ready")]})
    assert after["metadata"]["generation"] == 1
    assert jobs.get()["status"]["conditions"] == [condition("Ready")]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"conditions": [condition("Ready"), condition("Ready", "False")]}, "Duplicate value"),
        ({"conditions": [condition("Ready", "Yes")]}, 'supported values: "True", "False", "Unknown"'),
        ({"conditions": [condition("Ready", reason="not a word")]}, "should match"),
        ({"savings": {"energy": "3.25", "slowdown": "0%"}}, "status.savings.energy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_status_is_refused(jobs: Jobs, status: dict[str, Any], message: str) -> None:
    jobs.create(MINIMAL)
    with pytest.raises(ApiException, match="Invalid") as refused:
        jobs.patch_status(status)
    assert message in json.loads(refused.value.body)["message"]
    assert "status" not in jobs.get()


def test_kubectl_shows_the_job_in_one_line(jobs: Jobs, server: Server, namespace: str) -> None:
    beside = server.plane.assets if server.plane else None
    kubectl = shutil.which("kubectl", path=beside) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: its columns are not checked")
    jobs.create(edited({"objective.type": "MinEnergy"}))
    jobs.patch_status(
        {
            "conditions": [condition("Ready"), condition("StragglerDetected", "False")],
            "savings": {"energy": "12.5%", "slowdown": "0.1%"},
        }
    )
    command = [kubectl, "--kubeconfig", server.kubeconfig, "-n", namespace, "get", keys.SHORT_NAME, "-o", "wide"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    row = dict(zip(shown[0].split(), shown[1].split(), strict=False))
    assert row["NAME"] == "job"
    assert (row["READY"], row["REASON"], row["MODE"], row["OBJECTIVE"]) == (
        "True",
        "PlanInForce",
        "Enforce",
        "MinEnergy",
    )
    assert (row["SAVED"], row["SLOWDOWN"], row["STRAGGLER"]) == ("12.5%", "0.1%", "False")

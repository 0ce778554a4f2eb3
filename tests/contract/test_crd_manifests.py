"""The CRDs: the committed files are the generated ones, and every field follows the API conventions.

The schema, which an API server checks, and the operator's own parser accept and refuse the same manifests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.offenders import about_each

from perseus_core import keys
from perseus_operator.api.budget import BudgetSpec
from perseus_operator.api.crd import budget_crd, class_crd, crd, definitions, frontier_crd, pool_crd, profile_crd
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import ScheduleName
from perseus_operator.api.schema import dump, openapi_of, parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.api.status import StatusFigures
from perseus_operator.errors import InvalidSpec
from perseus_operator.nodes.workloads import asks_for_gpu
from perseus_solver.schedules import SCHEDULES

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = crd()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]
BUDGET, CLASS, PROFILE, FRONTIER, POOL = (
    made()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for made in (budget_crd, class_crd, profile_crd, frontier_crd, pool_crd)
)
MINIMAL: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": 4, "microbatches": 8},
    "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
}


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and every schema below it, with their paths."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


FIELDS = [
    (path, schema)
    for root, name in (
        (SCHEMA, ""),
        (BUDGET, "budget."),
        (CLASS, "class."),
        (PROFILE, "profile."),
        (FRONTIER, "frontier."),
        (POOL, "pool."),
    )
    for part in ("spec", "status")
    if part in root["properties"]
    for path, schema in nodes(root["properties"][part], f"{name}{part}")
    if not path.endswith("[]")
]


def test_the_committed_crds_are_the_generated_ones() -> None:
    folder = REPOSITORY / "deploy" / "crds"
    committed = {path.stem: path.read_text() for path in folder.iterdir()}
    assert committed == definitions(), "run `make generate`"


@about_each(FIELDS, lambda field: field[0])
def test_every_field_follows_the_conventions(field: tuple[str, dict[str, Any]]) -> None:
    path, schema = field
    assert schema.get("description", "").endswith("."), "a description that is a sentence"
    kind, name = schema["type"], path.rpartition(".")[2]
    assert kind != "number", "no floats"
    assert kind != "boolean" or name == "suspend", "an enum is clearer; suspend has the name that every workload uses"
    if kind == "integer" and name != "observedGeneration":
        assert {"minimum", "maximum", "format"} <= schema.keys()
        assert schema["maximum"] < 2 ** (31 if schema["format"] == "int32" else 63)
        for word in ("time", "power", "energy", "cap"):
            if word in name.lower() and name != "points":
                assert name.endswith(("Microseconds", "Milliseconds", "Millijoules", "Milliwatts", "Watts")), "a unit"
    if kind == "string":
        assert "enum" in schema or "maxLength" in schema or schema.get("format") == "date-time"
        for word in schema.get("enum", ()):
            assert word[0].isupper() or word[0].isdigit(), "CamelCase"
    if kind == "array":
        plain = "properties" not in schema["items"]
        assert schema["x-kubernetes-list-type"] == ("set" if plain else "map")
        assert plain or schema["x-kubernetes-list-map-keys"]
        assert "maxItems" in schema
    if kind == "object" and "properties" not in schema:
        assert {"additionalProperties", "maxProperties"} <= schema.keys()
    for rule in schema.get("x-kubernetes-validations", ()):
        assert len(rule["message"]) > 10


def test_the_fields_of_all_kinds_are_found() -> None:
    assert len(FIELDS) > 250


def test_kubectl_shows_the_main_columns() -> None:
    names = crd()["spec"]["names"]
    assert names["shortNames"] == [keys.SHORT_NAME]
    assert names["categories"] == ["perseus"]
    assert VERSION["subresources"] == {"status": {}}
    columns = {column["name"] for column in VERSION["additionalPrinterColumns"]}
    assert {"Ready", "Mode", "Objective", "Saved", "Slowdown", "Age"} <= columns
    [reason] = [column for column in VERSION["additionalPrinterColumns"] if column["name"] == "Reason"]
    assert "priority" not in reason, "why a job is not ready, such as Profiling, is seen without -o wide"


def test_the_solver_has_every_schedule_of_the_crd() -> None:
    assert {name.solver_name for name in ScheduleName} == {*SCHEDULES, "custom"}


@pytest.mark.parametrize("kind", ["Job", "Deployment"])
def test_workloads_of_the_page_about_classes_are_samples_and_ask_for_nothing_of_ours(kind: str) -> None:
    text = (REPOSITORY / f"deploy/samples/unmodified-{kind.lower()}.yaml").read_text()
    workload = yaml.safe_load(text)
    page = (REPOSITORY / "docs/energy-classes.md").read_text()
    assert text[text.index("apiVersion:") :] in page
    assert workload["kind"] == kind
    assert asks_for_gpu(workload["spec"]["template"]["spec"]), "a class passes over pods without a GPU"
    assert keys.API_GROUP not in text


def test_the_samples_are_accepted() -> None:
    for path in (REPOSITORY / "deploy/samples").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document["kind"] == keys.KIND:
                jsonschema.validate(document["spec"], SPEC)
                parse_spec(JobSpec, document["spec"])
            if document and document["kind"] == keys.POOL_KIND:
                jsonschema.validate(document["spec"], POOL["properties"]["spec"])
                parse_spec(PoolSpec, document["spec"])
            if document and document["kind"] == keys.BUDGET_KIND:
                jsonschema.validate(document["spec"], BUDGET["properties"]["spec"])
                parse_spec(BudgetSpec, document["spec"])
            if document and document["kind"] == keys.CLASS_KIND:
                jsonschema.validate(document["spec"], CLASS["properties"]["spec"])
                parse_spec(ClassSpec, document["spec"])


def test_defaults_are_the_same_in_schema_and_parser() -> None:
    parsed = dump(parse_spec(JobSpec, MINIMAL))
    for name, schema in SPEC["properties"].items():
        if "default" in schema:
            assert parsed[name] == schema["default"], name


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"objective": {"type": "MinEnergy"}},
    {"objective": {"type": "MaxSlowdown", "maxSlowdown": "2.5%"}},
    {"objective": {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1}}},
    {"objective": {"type": "Deadline", "deadline": {"finishBy": "2030-01-31T18:00:00Z", "iterations": 10}}},
    {"objective": {"type": "PowerCap", "powerCapWatts": 5000}},
    {"straggler": {"mode": "Ignore", "slowdownThreshold": "50%", "recoveryThreshold": "0.5%", "confirmIterations": 1}},
    {"pipeline": {"schedule": "Interleaved1F1B", "stages": 4, "microbatches": 8, "chunks": 2}},
    {"pipeline": {"scheduleRef": {"name": "s"}, "stages": 4}},
    {"pipeline": {"schedule": "FromRanks", "stages": 4}},
    {"profile": {"profileRef": {"name": "p"}}},
    {"profile": {"profileRef": {"name": "p"}, "online": {}}},
    {"profile": {"online": {"maxClocks": 8}}},
    {"profile": {"profileRef": {"name": "p"}, "online": {"maxClocks": 255}, "blockingPowerMilliwatts": 0}},
    {"mode": "Recommend", "points": 2, "baselineIterations": 0},
    {"workload": {"selector": {"matchLabels": {"app": "x"}}}},
]

REFUSED: list[tuple[str, Any, str, bool]] = [
    # path, value, message, refused by the schema alone (else by a CEL rule)
    ("objective", {"type": "FixedClock", "clockMegahertz": 900}, "must not be set with objective.type FixedC", False),
    ("objective", {"type": "FixedClock"}, "clockMegahertz must be set if and only if type is FixedClock", False),
    ("pipeline.schedule", "2F2B", "spec.pipeline.schedule: must be one of 1F1B, GPipe, ", True),
    ("pipeline", {"stages": 4, "microbatches": 8}, "exactly one of schedule and scheduleRef must be set", False),
    ("pipeline.scheduleRef", {"name": "s"}, "exactly one of schedule and scheduleRef must be set", False),
    ("pipeline.microbatches", None, "microbatches must be set for a schedule by name", False),
    ("pipeline.stages", 0, "spec.pipeline.stages: must be an integer from 1 to 1024, not 0", True),
    ("pipeline.stages", -4, "spec.pipeline.stages: must be an integer from 1 to 1024, not -4", True),
    ("pipeline.stages", 2.5, "spec.pipeline.stages: must be an integer", True),
    ("pipeline.stages", True, "spec.pipeline.stages: must be an integer", True),
    ("pipeline.stages", "4", "spec.pipeline.stages: must be an integer", True),
    ("pipeline.chunks", 2, "chunks must be set if and only if schedule is Interleaved1F1B", False),
    ("pipeline.schedule", "Interleaved1F1B", "chunks must be set if and only if schedule is Interleaved1F1B", False),
    ("pipeline.chunks", 1, "spec.pipeline.chunks: must be an integer from 2 to 64, not 1", True),
    ("pipeline.microbatches", 0, "spec.pipeline.microbatches: must be an integer from 1 to 65536, not 0", True),
    ("pipeline.dataParallel", 0, "spec.pipeline.dataParallel: must be an integer", True),
    ("pipeline.tensorParallel", -1, "spec.pipeline.tensorParallel: must be an integer", True),
    ("profile.blockingPowerMilliwatts", -1, "spec.profile.blockingPowerMilliwatts: must be an integer", True),
    ("profile", {"configMapRef": {"name": "p"}}, "blockingPowerMilliwatts must be set with configMapRef", False),
    ("profile", {"blockingPowerMilliwatts": 1}, "exactly one of configMapRef and profileRef must be set", False),
    ("profile", {"profileRef": {"name": "p"}, "configMapRef": {"name": "p"}}, "exactly one of configMapRef", False),
    ("profile", {"configMapRef": {"name": "p"}, "online": {}}, "online must not be set with configM", False),
    ("profile.online", {"maxClocks": 1}, "spec.profile.online.maxClocks: must be an integer from 2 to 255", True),
    ("profile.online", {"maxSlowdown": "2"}, "spec.profile.online.maxSlowdown: must be a percentage", True),
    ("profile.configMapRef.name", "", "spec.profile.configMapRef.name: must be the name of a ConfigMap", True),
    ("profile.configMapRef.name", "Upper", "spec.profile.configMapRef.name: must be the name of a ConfigMap", True),
    ("profile.configMapRef.key", "a/b", "spec.profile.configMapRef.key: must be a ConfigMap key", True),
    ("objective", {"type": "Fast"}, "spec.objective.type: must be one of MaxThroughput, MinEnergy", True),
    ("objective", {"type": "MaxSlowdown", "maxSlowdown": "3"}, "must be a percentage such as 3% or 2.5%", True),
    ("objective", {"type": "MaxSlowdown", "maxSlowdown": "-3%"}, "must be a percentage such as 3% or 2.5%", True),
    ("objective", {"type": "MaxSlowdown"}, "maxSlowdown must be set if and only if type is MaxSlowdown", False),
    ("objective", {"type": "MinEnergy", "maxSlowdown": "3%"}, "if and only if type is MaxSlowdown", False),
    ("objective", {"type": "Deadline"}, "deadline must be set if and only if type is Deadline", False),
    ("objective", {"type": "PowerCap"}, "powerCapWatts must be set if and only if type is PowerCap", False),
    ("objective", {"type": "PowerCap", "powerCapWatts": 0}, "spec.objective.powerCapWatts: must be an integer", True),
    ("objective", {"type": "Deadline", "deadline": {}}, "exactly one of iterationTimeMicroseconds and finishBy", False),
    (
        "objective",
        {"type": "Deadline", "deadline": {"finishBy": "2030-01-31T18:00:00Z"}},
        "finishBy and iterations must be set together",
        False,
    ),
    (
        "objective",
        {"type": "Deadline", "deadline": {"finishBy": "tomorrow", "iterations": 1}},
        "must be a date and time such as 2030-01-31T18:00:00Z, not 'tomorrow'",
        True,
    ),
    (
        "objective",
        {"type": "Deadline", "deadline": {"finishBy": "2030-13-31T18:00:00Z", "iterations": 1}},
        "must be a date and time",
        True,
    ),
    ("straggler", {"slowdownThreshold": "1%"}, "recoveryThreshold must be below slowdownThreshold", False),
    ("straggler", {"confirmIterations": 0}, "spec.straggler.confirmIterations: must be an integer", True),
    ("mode", "Force", "spec.mode: must be one of Enforce, Canary, Recommend, Observe, not 'Force'", True),
    ("points", 1, "spec.points: must be an integer from 2 to 1000, not 1", True),
    ("workload", {"selector": {"matchLabels": {}}}, "must be a map of 1 to 16 labels", True),
    ("workload", {"selector": {"matchLabels": {"a": 5}}}, "must be a map of 1 to 16 labels", True),
]


def schema_accepts(spec: Any) -> bool:
    # jsonschema checks date-time only with an extra package; the API server has its own check.
    checker = jsonschema.FormatChecker(formats=())

    @checker.checks("date-time", raises=ValueError)
    def is_date_time(value: Any) -> bool:
        from datetime import datetime

        return not isinstance(value, str) or bool(datetime.fromisoformat(value))

    validator = jsonschema.Draft202012Validator(SPEC, format_checker=checker)
    return validator.is_valid(spec)


@pytest.mark.parametrize("changes", ACCEPTED, ids=str)
def test_accepted(changes: dict[str, Any]) -> None:
    spec = {**MINIMAL, **changes}
    assert schema_accepts(spec)
    parsed = parse_spec(JobSpec, spec)
    assert schema_accepts(dump(parsed))
    assert parse_spec(JobSpec, dump(parsed)) == parsed


@pytest.mark.parametrize("left_out", [["pipeline"], ["profile"], ["pipeline", "profile"]], ids=str)
def test_shape_and_profile_may_be_left_to_the_training_processes(left_out: list[str]) -> None:
    spec = {key: value for key, value in MINIMAL.items() if key not in left_out}
    assert schema_accepts(spec)
    parsed = parse_spec(JobSpec, spec)
    assert dump(parsed).keys() & {"pipeline", "profile"} == MINIMAL.keys() - set(left_out)
    assert parse_spec(JobSpec, dump(parsed)) == parsed


def test_a_job_with_a_fixed_clock_has_neither_pipeline_nor_profile() -> None:
    spec = {"objective": {"type": "FixedClock", "clockMegahertz": 900}}
    assert schema_accepts(spec)
    parsed = parse_spec(JobSpec, spec)
    assert not parsed.is_planned
    assert not {"pipeline", "profile"} & dump(parsed).keys()
    assert parse_spec(JobSpec, dump(parsed)) == parsed


@pytest.mark.parametrize(("path", "value", "message", "by_schema"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(path: str, value: Any, message: str, by_schema: bool) -> None:
    spec = copy.deepcopy(MINIMAL)
    inner, names = spec, path.split(".")
    for name in names[:-1]:
        inner = inner[name]
    if value is None:
        del inner[names[-1]]
    else:
        inner[names[-1]] = value
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(JobSpec, spec)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert schema_accepts(spec) is not by_schema
    if not by_schema:
        rules = [r["message"] for _, s in nodes(SPEC, "spec") for r in s.get("x-kubernetes-validations", ())]
        assert any(message in rule for rule in rules), "a CEL rule of the API server has the same message"


@pytest.mark.parametrize("raw", [None, [], "x", {"pipelin": {}}])
def test_a_value_that_is_no_spec_is_refused(raw: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"^spec"):
        parse_spec(JobSpec, raw)


def test_the_fields_that_the_training_processes_run_are_immutable() -> None:
    fixed = {
        path
        for path, schema in nodes(SPEC, "spec")
        for rule in schema.get("x-kubernetes-validations", ())
        if rule["rule"] == "self == oldSelf"
    }
    optional = {"schedule", "scheduleRef", "microbatches", "chunks"}
    assert fixed == {f"spec.pipeline.{name}" for name in (*optional, "stages", "tensorParallel")}
    pipeline = SPEC["properties"]["pipeline"]
    rules = {rule["rule"] for rule in pipeline["x-kubernetes-validations"]}
    assert {f"has(self.{name}) == has(oldSelf.{name})" for name in optional} <= rules, "nor can they come or go"


def test_status_fields_and_schema_are_the_same() -> None:
    declared = set(openapi_of(StatusFigures)["properties"])
    assert set(SCHEMA["properties"]["status"]["properties"]) == declared | {"conditions", "observedGeneration"}

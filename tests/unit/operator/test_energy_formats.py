"""A month of a made-up fleet in every format, checked by the format's own rules, and reproduced from its own file."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from focus_data_toolkit.model.validator import lint_focus_1_4_structure
from spdx_python_model import v3_0_1 as spdx3
from tests.doubles.statements import source_of, statement_of
from tests.made_up_fleet import BEGIN_S, END_S

from perseus_operator.errors import UnusableArgument
from perseus_operator.report import annex_xi, focus, rows_csv, spdx, stored, table
from perseus_operator.report.figures import TOTAL, rows
from perseus_operator.report.merged import merge
from perseus_operator.report.statement import Statement

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", params=["read at once", "merged of its days"])
def october(request: pytest.FixtureRequest) -> Statement:
    days = request.param == "merged of its days"
    return merge([source_of(day) for day in range(31)]) if days else statement_of(BEGIN_S, END_S)


@pytest.mark.parametrize("by", ["job", "namespace", "model"])
def test_it_is_reproduced_from_its_own_file_byte_by_byte(october: Statement, by: str, tmp_path: Path) -> None:
    file = tmp_path / "october.json"
    file.write_text(stored.write(october, by))
    again, how = stored.read(file)
    assert (again, how) == (october, by)
    assert stored.write(again, how) == file.read_text()
    for write in (table.write, rows_csv.write, spdx.write, focus.write, annex_xi.write):
        assert write(again, by, stored.digest(again)) == write(october, by, stored.digest(october))


def test_its_digest_is_that_of_its_data_as_anyone_computes_it(october: Statement) -> None:
    found = json.loads(stored.write(october, "job"))
    canonical = json.dumps(found["data"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert found["digest"] == f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def test_its_file_follows_the_published_schema(october: Statement) -> None:
    schema = json.loads((ROOT / "docs" / "data" / "energy-statement.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = json.loads(stored.write(october, "model"))
    jsonschema.validate(found, schema)
    fields = list(found["data"])
    assert [*schema["properties"]["data"]["required"], *(["parts"] if october.parts else [])] == fields
    assert list(schema["properties"]["data"]["properties"])[: len(fields)] == fields, "the schema has every field"
    del found["data"]["factors"]["pue"]["source"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema)


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = to

    return change


MEMBER = ("data", "members", 0)
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a figure": (_set("figures", "rows", 0, "measured", "energyKilowattHours", to=1.0), "its figures do not follow"),
    "the boundary": (_set("boundary", to="the site"), "its boundary do"),
    "a measurement": (_set("data", "members", 0, "name", to="x"), "was changed: the digest of its data is"),
    "a factor": (_set("data", "factors", "pue", "value", to=1.0), "was changed: the digest of its data is"),
    "an unknown field": (_set("data", "more", to=1), "was changed: the digest of its data is"),
    "hours that are too few": (_set(*MEMBER, "hours", "energyJoules", to=[1.0]), "energyJoules: must be 744 numbers"),
    "hours that are no numbers": (_set(*MEMBER, "hours", "energyJoules", to=["1"] * 744), "must be 744 numbers"),
    "no members": (_set("data", "members", to=3), "data.members: must be a list"),
    "a period of a century": (_set("data", "period", "endSeconds", to=BEGIN_S + 36525 * 86400), "last at most 366"),
    "a period that ends first": (_set("data", "period", "endSeconds", to=BEGIN_S), "must end after its begin"),
    "a kind": (_set(*MEMBER, "kind", to="vm"), "kind must be job or pool"),
    "a text": (_set("data", "scope", to="x" * 10_001), "data.scope: must be a text of at most 10,000"),
    "a share": (_set(*MEMBER, "saved", to={"mean": True}), "saved.mean: must be a number"),
    "a grouping": (_set("figures", "by", to="colour"), "figures.by: must be one of"),
    "a price that has gone": (
        _set("data", "factors", "price", "hours", to=[None] * 744),
        "must be a number: energy was measured then",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_was_changed_is_refused_with_what_is_wrong(october: Statement, name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    found = json.loads(stored.write(october, "job"))
    change(found)
    file = tmp_path / "october.json"
    file.write_text(json.dumps(found))
    with pytest.raises(UnusableArgument, match=re.escape(message)):
        stored.read(file)


def test_focus_takes_its_charges(october: Statement) -> None:
    """By the columns and rules of FOCUS 1.4, as focus-data-toolkit has them of the specification's workbook."""
    charges = list(csv.DictReader(io.StringIO(focus.write(october, "job", "sha256:0"))))
    assert lint_focus_1_4_structure("Cost and Usage", charges).violations == ()
    [jobs, pools] = [row for row in rows(october, "job") if row.name == TOTAL]
    billed = sum(float(charge["BilledCost"]) for charge in charges)
    assert billed == pytest.approx(jobs.estimated["cost"] + pools.estimated["cost"]), "no charge is lost or added"
    for charge in charges:
        assert charge["BillingPeriodStart"] <= charge["ChargePeriodStart"] < charge["ChargePeriodEnd"]
        assert charge["ChargePeriodEnd"] <= charge["BillingPeriodEnd"]
    assert len({(charge["ResourceId"], charge["ChargePeriodStart"]) for charge in charges}) == len(charges)


def test_focus_says_what_it_lacks(october: Statement) -> None:
    for lacking in (replace(october, organization=""), replace(october, factors={})):
        with pytest.raises(UnusableArgument, match="needs --price and --currency, and --organization"):
            focus.write(lacking, "job", "")


@pytest.mark.parametrize("by", ["model", "job"])
def test_spdx_reads_its_packages(october: Statement, by: str) -> None:
    """By spdx-python-model, which is made of the SHACL shapes of SPDX 3.0.1."""
    objects = spdx3.SHACLObjectSet()
    spdx3.JSONLDDeserializer().read(io.BytesIO(spdx.write(october, by, "sha256:0").encode()), objects)
    assert not objects.missing_ids
    packages = {package.name: package for package in objects.foreach_type("ai_AIPackage")}
    expected = {row.name: row for row in rows(october, by) if row.name != TOTAL}
    assert packages.keys() == expected.keys()
    for name, row in expected.items():
        energy = packages[name].ai_energyConsumption
        training, inference = energy.ai_trainingEnergyConsumption, energy.ai_inferenceEnergyConsumption
        [amount] = training if row.kind == "job" else inference
        assert bool(training) != bool(inference)
        assert amount.ai_energyQuantity == row.measured["energyKilowattHours"]
        assert amount.ai_energyUnit.endswith("EnergyUnitType/kilowattHour")
    [document] = objects.foreach_type("SpdxDocument")
    assert len(document.rootElement) == len(packages)


def test_spdx_of_nothing_is_a_document_too(october: Statement) -> None:
    objects = spdx3.SHACLObjectSet()
    text = spdx.write(replace(october, members=()), "job", "sha256:0")
    spdx3.JSONLDDeserializer().read(io.BytesIO(text.encode()), objects)
    assert not list(objects.foreach_type("ai_AIPackage"))


ANNEX_XI = {
    "(d)": ("floating point operations", "GPU days", "training time", "optimiser steps"),
    "(e)": ("energy of GPUs, MWh", "energy with server and site, MWh"),
}
"""What Regulation (EU) 2024/1689, Annex XI, section 1, point 2 asks for: "(d) the computational resources used to train
the model (e.g. number of floating point operations), training time, and other relevant details related to the training;
(e) known or estimated energy consumption of the model" (artificialintelligenceact.eu/annex/11)."""


def test_annex_xi_has_each_field_of_every_model_and_says_whether_it_is_known_or_estimated(october: Statement) -> None:
    text = annex_xi.write(october, "model", stored.digest(october))
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    trained = [part for part in parts if part.startswith("Training: ")]
    assert len(trained) == len([row for row in rows(october, "model") if row.kind == "job" and row.name != TOTAL])
    for part in trained:
        assert not re.search(r"\b1 jobs", part)
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
        for point, fields in ANNEX_XI.items():
            for field in fields:
                [[_, _, value, basis]] = [line for line in cells if line[0] == point and line[1].startswith(field)]
                assert value
                assert re.match("known|estimated|not known", basis), basis
    [megawatt_hours] = re.findall(r"energy of GPUs, MWh \| ([\d.]+) \| known", trained[0])
    largest = next(row for row in rows(october, "model") if row.kind == "job" and row.name != TOTAL)
    assert float(megawatt_hours) == pytest.approx(largest.measured["energyKilowattHours"] / 1000, rel=0.005)
    assert stored.digest(october) in text


def test_csv_keeps_what_was_measured_apart_and_runs_no_formula(october: Statement) -> None:
    evil = replace(october.members[0], model="=HYPERLINK(1)")
    statement = replace(october, members=(evil, *october.members[1:]))
    lines = list(csv.DictReader(io.StringIO(rows_csv.write(statement, "model", "sha256:0"))))
    assert {line["row"] for line in lines} >= {"'=HYPERLINK(1)", TOTAL}
    for line, row in zip(lines, rows(statement, "model"), strict=True):
        shown = {name for name, cell in line.items() if name.startswith(("measured_", "estimated_")) and cell}
        assert shown == {f"measured_{name}" for name in row.measured} | {f"estimated_{name}" for name in row.estimated}


def test_the_table_states_period_boundary_sources_and_marks_what_is_estimated(october: Statement) -> None:
    text = table.write(october, "namespace", stored.digest(october))
    title, jobs, pools, notes = text.split("\n\n")
    assert title == "Energy from 2026-10-01T00:00:00Z to 2026-11-01T00:00:00Z, all namespaces"
    assert jobs.startswith("NAMESPACE  JOBS")
    assert pools.startswith("NAMESPACE  POOLS")
    head = jobs.splitlines()[0]
    assert re.findall(r"~[A-Z/]+", head) == ["~SAVED", "~SAVED", "~KWH/M", "~SITE", "~EUR", "~KG", "~KG"]
    for words in ("GPU boards by their own counters", "vendor's sheet", "site meters, 2025", "exchange.csv", "95 %"):
        assert words in notes
    assert stored.digest(october) in notes


def test_the_table_says_what_it_does_not_know(october: Statement) -> None:
    empty = table.write(replace(october, members=()), "job", "sha256:0")
    assert empty.endswith("all namespaces: nothing of jobs or pools was measured.")
    members = tuple(
        replace(one, hours={**one.hours, "energyJoules": (None,) * 300 + one.hours["energyJoules"][300:]})
        for one in october.members
    )
    measured_hours = (None,) * 300 + october.measured_hours[300:]
    text = table.write(replace(october, members=members, measured_hours=measured_hours), "job", "sha256:0")
    assert (
        "energy was measured in 444.0 of 744.0 hours, all between 2026-10-13T12:00:00Z and 2026-11-01T00:00:00Z"
        in " ".join(text.split())
    )
    assert "hours in which pods ran and no energy was measured; they are in no sum" in " ".join(text.split())

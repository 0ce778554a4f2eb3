"""The chart's schema and documentation are generated from its values file, and the committed files are up to date."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "perseus"


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("perseus_deploy_chart", ROOT / "deploy" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_a_value_has_a_default_a_description_and_a_schema(chart: ModuleType) -> None:
    schema, values = chart.read_values(
        "# A note on the file.\n\n"
        "part:\n"
        "  # -- How many,\n"
        "  # in all.\n"
        "  # @schema {minimum: 1,\n"
        "  #   maximum: 9}\n"
        "  count: 3\n"
        "  # -- Anything.\n"
        "  # @schema {type: object}\n"
        "  free: {a: 1}\n"
    )
    part = schema["properties"]["part"]
    assert part["properties"]["count"] == {
        "description": "How many, in all.",
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
    }
    assert part["required"] == ["count"], "null would remove it; only a map may be removed"
    assert not part["additionalProperties"]
    assert [(value.path, value.default) for value in values] == [("part.count", 3), ("part.free", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Not documentation.\nkey: 1\n", "key: no `# --` comment above it"),
        ("# -- What it does.\nkey: null\n", "key: its default has no known type"),
        ("- 1\n", "must be a mapping"),
    ],
)
def test_a_value_without_description_or_type_is_refused(chart: ModuleType, text: str, message: str) -> None:
    with pytest.raises(chart.InvalidValues, match=message):
        chart.read_values(text)


def test_the_committed_files_are_the_generated_ones(chart: ModuleType) -> None:
    schema, values = chart.read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")) == schema
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{value.path}` |" in readme for value in values)


def test_the_defaults_are_valid(chart: ModuleType) -> None:
    defaults: Any = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = chart.read_values((CHART / "values.yaml").read_text(encoding="utf-8"))[0]
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(defaults, schema)
    assert {"leaseTtlS", "solveWorkers"} <= set(
        schema["properties"]["operator"]["properties"]["settings"]["properties"]
    )

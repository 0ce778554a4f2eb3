"""What is generated in the chart: schema and README's table from values.yaml, the CRDs' template from the typed models.

In values.yaml ``# --`` above a key says what the value does, ``# @schema`` (YAML)
what it may be beyond the type of its default; ``{settings: operator}`` there stands for the fields of that program's
settings. Nothing is decided here: what a value does is in the templates.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "perseus"
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_BEGIN, _END = "<!-- values: generated from values.yaml by `make generate` -->\n", "<!-- /values -->\n"

# Settings that the chart itself gives, from values of its own or because they follow from the pod.
_GIVEN = {
    "operator": {
        "namespaces",
        "agent_namespace",
        "tls_server_name",
        "metrics_address",
        "ready_file",
        "log_format",
        *("webhook_address", "webhook_cert", "webhook_key", "webhook_resource", "agent_socket"),
        *("rpc_address", "rpc_allowed_san", "rpc_ca"),
        *("solver_address", "solver_ca", "solver_name"),
        "otlp_endpoint",
    },
    "solver": {"address", "metrics_address", "allowed_san", "ready_file", "log_format", "exit_when_idle_s"},
    "agent": {
        *("node_name", "devices", "socket", "grpc_address", "metrics_address", "journal", "keeper_socket", "proc_root"),
        *("pod_resources_socket", "device_plugins", "allowed_san", "ready_file"),
    },
}
_NEVER = {"tls_cert", "tls_key", "tls_ca", "insecure"}
_LEVELS = {"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]}
_LIMITS: dict[tuple[str, str], dict[str, Any]] = {
    ("operator", "log_level"): _LEVELS,
    ("agent", "log_level"): _LEVELS,
    ("solver", "log_level"): _LEVELS,
    # What the program alone cannot know: it must have given every clock back before the kubelet kills it, and the
    # shortest grace period that the schema allows is 30 s.
    ("agent", "drain_timeout_s"): {"maximum": 25},
}


class InvalidValues(Exception):
    """values.yaml breaks a rule of this page; the message names the key."""


@dataclass(frozen=True)
class Value:
    """One documented value; a section of values is not one."""

    path: str
    default: Any
    schema: dict[str, Any]


def write_chart(crds: Iterable[str]) -> None:
    """Bring values.schema.json, README.md and the CRDs' template up to date."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema, values = read_values(text)
    (CHART / "values.schema.json").write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    readme = CHART / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(_BEGIN)
    readme.write_text(before + _BEGIN + "".join(_table(values)) + _END + rest.partition(_END)[2], encoding="utf-8")
    template = "---\n".join(_crd_template(crd) for crd in crds)
    (CHART / "templates" / "crd.yaml").write_text(template, encoding="utf-8")


def read_values(text: str) -> tuple[dict[str, Any], list[Value]]:
    """The schema of a documented values file, and its values in order.

    Raises:
        InvalidValues: a key without ``# --``, or a default that has no known type.
    """
    values: list[Value] = []
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise InvalidValues("values.yaml: must be a mapping")
    schema = _section(root, text.splitlines(), "", values)
    # A parent chart hands these to every chart below it.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}, values


def _section(node: yaml.MappingNode, lines: list[str], path: str, values: list[Value]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else key.value
        doc, stated = _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not stated:
            properties[key.value] = _section(value, lines, name, values)
            required.append(key.value)
            continue
        if not doc:
            raise InvalidValues(f"{name}: no `# --` comment above it")
        default = yaml.load(yaml.serialize(value), Loader=yaml.SafeLoader)
        if type(default) not in _KINDS:
            raise InvalidValues(f"{name}: its default has no known type")
        schema: dict[str, Any] = {"description": doc, "type": _KINDS[type(default)]}
        program = stated.pop("settings", None)
        schema.update(_settings_schema(program) if program else stated)
        properties[key.value] = schema
        values.append(Value(name, default, schema))
        if program:
            values += [Value(f"{name}.{field}", None, of) for field, of in schema["properties"].items()]
        # Null takes a key away. What may be empty may go; templates rely on the rest.
        if "minItems" in schema or not (isinstance(default, list | dict) or default == ""):
            required.append(key.value)
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _comment(lines: list[str], line: int) -> tuple[str, dict[str, Any]]:
    """Description and stated schema in the comment directly above a line."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    doc: list[str] = []
    stated: list[str] = []
    target: list[str] | None = None
    for text in lines[first:line]:
        comment = text.lstrip().removeprefix("#").strip()
        if comment.startswith("-- "):
            target = doc
        elif comment.startswith("@schema "):
            target = stated
        if target is not None:
            target.append(comment.removeprefix("-- ").removeprefix("@schema "))
    return " ".join(doc), yaml.safe_load(" ".join(stated)) or {} if stated else {}


def _settings_schema(program: str) -> dict[str, Any]:
    from perseus_agent.settings import Settings as AgentSettings
    from perseus_operator.controller.settings import Settings as OperatorSettings
    from perseus_operator.servers.solver.settings import SolverSettings

    of_program = {"operator": OperatorSettings, "agent": AgentSettings, "solver": SolverSettings}
    fields = dataclasses.fields(of_program[program])
    properties = {}
    for field in fields:
        if field.name in _GIVEN[program] | _NEVER:
            continue
        schema: dict[str, Any] = {
            "description": f"{field.metadata['doc']} Default: {json.dumps(field.default)}.",
            "type": _KINDS[type(field.default)],
        }
        if field.metadata["minimum"] is not None:
            schema["minimum"] = field.metadata["minimum"]
        schema.update(_LIMITS.get((program, field.name), {}))
        head, *tail = field.name.split("_")
        properties[head + "".join(map(str.capitalize, tail))] = schema
    return {"additionalProperties": False, "properties": properties}


def _table(values: list[Value]) -> Iterator[str]:
    yield "| value | default | what it does |\n|---|---|---|\n"
    for value in values:
        default = "" if value.default is None else f"`{json.dumps(value.default)}`"
        choices = ", ".join(f"`{choice}`" for choice in value.schema.get("enum", ()))
        doc = value.schema["description"] + (f" One of {choices}." if choices else "")
        yield f"| `{value.path}` | {default} | {doc.replace('|', '&#124;')} |\n"


def _crd_template(crd: str) -> str:
    """The CRD behind its toggles. A template, not in crds/: Helm never upgrades what is there."""
    if "{{" in crd:
        raise InvalidValues("the CRD: holds '{{', which a template would read")
    note, _, body = crd.partition("\n")
    name, separator, spec = body.partition("\nspec:\n")
    metadata = (
        '\n  labels: {{- include "perseus.labels" (dict "root" .) | nindent 4 }}'
        '\n  {{- $own := ternary (dict "helm.sh/resource-policy" "keep") (dict) .Values.crds.keep }}'
        '\n  {{- include "perseus.annotations" (dict "root" $ "own" $own) }}'
    )
    return f"{note}\n{{{{- if .Values.crds.enabled }}}}\n{name}{metadata}{separator}{spec}{{{{- end }}}}\n"

"""What the operator stores in custom resources of its own, typed: profiles that it measured, and each job's frontier.

Users may write the spec of a PerseusProfile, too. Everything else is the operator's: the chart's roles let no user
write a PerseusFrontier, or a status.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from perseus_operator.api.job import MAX_BLOCKING_POWER_MW
from perseus_operator.api.schema import FormerField, Rule, integer, nested, openapi_of, parse, text
from perseus_operator.errors import InvalidSpec
from perseus_operator.objects.values import Json

T = TypeVar("T")

MAX_PROFILE_BYTES = 1_000_000
MAX_CALIBRATION_BYTES = 400_000
MAX_FRONTIER_BYTES = 700_000
"""base64 makes four bytes of three, and an object must stay below the 1.5 MiB that etcd stores."""
MAX_SWEEP_BYTES = 300_000
MAX_WINDOWS_BYTES = 500_000
"""More than 3,200 windows: fifty of each of the most clocks."""


def _base64(description: str, max_bytes: int) -> str | None:
    field: str | None = text(
        description, rule="base64", max_length=4 * (max_bytes // 3 + 1), string_format="byte", required=False
    )
    return field


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """What was seen of an engine that serves, at every clock that was tried."""

    fingerprint: str = text(
        "SHA-256 over model, engine, version, flags, GPUs and driver: pools whose status.engine.fingerprint is this one"
        " use the profile, once their own windows agree with it.",
        rule="64 hexadecimal digits",
        max_length=64,
        pattern="^[0-9a-f]{64}$",
    )
    engine: str = text("Name and version of the engine, for people.", rule="a name", max_length=512)
    model: str = text("Name of the weights, for people.", rule="a name", max_length=512)
    windows: str = text(
        "Windows of about a second as CSV: clock (MHz), running requests, tokens in memory (of a nominal million),"
        " steps and their mean time (seconds), watts.",
        rule=f"CSV of at most {MAX_WINDOWS_BYTES} characters",
        max_length=MAX_WINDOWS_BYTES,
    )
    prompt_tokens: int = integer("Computed of a prompt, mean.", minimum=1, maximum=10_000_000)
    gpus: int | None = integer(
        "Of a replica, by which other pools of the model plan with it; absent: an earlier release has stored it.",
        minimum=1,
        maximum=1_024,
        required=False,
    )
    measured_at: str = text(
        "When it was stored last, RFC 3339; of a namespace the latest 16 stay.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        string_format="date-time",
    )


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """Time and energy of every instruction of a pipeline at every clock, or what was seen of an engine that serves."""

    csv: str | None = text(
        "The profile: stage,instruction,frequency,time,energy (MHz, seconds, joules). Absent: not measured yet.",
        rule=f"CSV of at most {MAX_PROFILE_BYTES} characters",
        max_length=MAX_PROFILE_BYTES,
        required=False,
    )
    blocking_power_milliwatts: int | None = integer(
        "Power of one GPU while it waits for another stage, in milliwatts; a PerseusJob may say otherwise.",
        minimum=0,
        maximum=MAX_BLOCKING_POWER_MW,
        required=False,
    )
    measured_on: str | None = text(
        "Shape of the pipeline that was measured; the profile is used for no other. Absent: for any.",
        rule="a shape such as 4 stages",
        max_length=253,
        required=False,
    )
    gpu_model: str | None = text(
        "Model of the GPUs that were measured, as NVML names it; the profile is used on no other. Absent: on any.",
        rule="a GPU model",
        max_length=128,
        required=False,
    )
    driver_version: str | None = text(
        "GPU driver at that time, for people.", rule="a version", max_length=64, required=False
    )
    version: int | None = integer(
        "How often it was measured, this time included; what it held before are PerseusProfiles of its name with -v and"
        " the number. Absent: once, or somebody else wrote it.",
        minimum=1,
        maximum=1_000_000,
        required=False,
    )
    switch_latency: str | None = text(
        "How long clock changes took on the GPUs that were measured, as JSON of the operator.",
        rule="JSON",
        max_length=100_000,
        required=False,
        earlier=FormerField(
            "clock_latency",
            {"description": "The same, as earlier releases wrote it.", "type": "string", "maxLength": 100_000},
        ),
    )
    serving: EngineProfile | None = nested(
        "What was seen of an engine that serves, by a ServingPool; such a profile has nothing else.",
        EngineProfile,
        required=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.csv) || !has(self.serving)",
            "csv and serving must not both be set",
            lambda spec: spec.csv is None or spec.serving is None,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class FrontierSpec:
    """What the operator has worked out for one PerseusJob, so that a restarted operator need not do it again."""

    digest: str | None = text(
        "SHA-256 of everything the frontier was solved from, as in the status of the PerseusJob.",
        rule="a digest",
        max_length=64,
        required=False,
    )
    solve_milliseconds: int | None = integer("Time the solver took.", minimum=0, maximum=10**9, required=False)
    points: int | None = integer("Number of plans.", minimum=1, maximum=100_000, required=False)
    data: str | None = _base64("The frontier in the solver's format.", MAX_FRONTIER_BYTES)
    sweep: str | None = _base64(
        "Measurements of a profile that is not finished, in the operator's format.", MAX_SWEEP_BYTES
    )


def parse_stored(model: type[T], raw: object) -> T | None:
    """Parse what an operator has stored: of another release perhaps, whose further fields are left out; None: there is
    nothing, or nothing that this release understands.
    """
    try:
        return parse(model, _pruned(raw, openapi_of(model)), "")
    except InvalidSpec:
        return None


def stored_items(raw: object) -> list[Mapping[str, Any]]:
    """The objects of a list as it is stored, without anything else."""
    return [each for each in raw if isinstance(each, Mapping)] if isinstance(raw, list) else []


def _pruned(raw: Any, openapi: Json) -> Any:
    """An object without the fields that its schema does not have, as an API server with this schema stores it."""
    if isinstance(raw, Mapping) and "properties" in openapi:
        properties = openapi["properties"]
        return {key: _pruned(value, properties[key]) for key, value in raw.items() if key in properties}
    if isinstance(raw, list) and "items" in openapi:
        return [_pruned(item, openapi["items"]) for item in raw]
    return raw

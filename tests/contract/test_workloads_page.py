"""The table of docs/workloads.md describes the presets, and the operator accepts the page's examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from perseus_core import keys
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.workload import WorkloadKind
from perseus_operator.nodes.workloads import PRESETS, Preset

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")


def documents() -> list[Any]:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def row(kind: WorkloadKind, preset: Preset) -> str:
    label, roles = preset.not_workers
    idle = f"`{label}`: {', '.join(f'`{role}`' for role in sorted(roles))}" if label else "–"
    attempt = "not shown"
    if preset.restart_label:
        attempt = f"a higher `{preset.restart_label}`"
    elif preset.owner_is_attempt:
        attempt = "another owner"
    name = f"`{preset.name_label}`"
    if preset.name_pattern != "{}":
        name += ": `NAME-xxxxx` or `NAME-raycluster-xxxxx`"
    suspended = f"`{preset.suspended_by}`" if preset.suspended_by else "–"
    return f"| `{kind}` | `{preset.group}` | {name} | {idle} | {attempt} | {suspended} |"


def test_the_table_describes_the_presets() -> None:
    rows = [line for line in PAGE.splitlines() if any(line.startswith(f"| `{kind}` |") for kind in WorkloadKind)]
    assert rows == [row(kind, preset) for kind, preset in PRESETS.items()]


def test_there_is_an_example_of_each_kind_and_its_pods_opt_in() -> None:
    made = {(document["apiVersion"], document["kind"]) for document in documents() if "apiVersion" in document}
    for kind, preset in PRESETS.items():
        if kind is not WorkloadKind.RAY_CLUSTER:  # a RayJob's example holds one
            assert (preset.group, kind.removeprefix("Volcano")) in made, kind
    workloads = [d for d in documents() if "apiVersion" in d and d["kind"] not in ("PerseusJob", "TrainJob")]
    assert all(f"'{keys.LABEL_JOB}': 'gpt3'" in str(document) for document in workloads)


def test_the_perseus_manifests_are_accepted() -> None:
    (job,) = [document for document in documents() if document.get("kind") == keys.KIND]
    assert parse_spec(JobSpec, job["spec"]).workload is not None
    fragments = [document for document in documents() if "apiVersion" not in document]
    assert len(fragments) == 2
    for fragment in fragments:
        assert parse_spec(JobSpec, job["spec"] | fragment["spec"]).workload is not None

"""The documentation is up to date: it explains every reason, lists every field, and every link has a target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from perseus_operator.api.budget import BudgetReason, BudgetSpec
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.energy_class import ClassReason, ClassSpec
from perseus_operator.api.job import JobSpec, StragglerMode
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.api.schema import openapi_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Return the text of a page without its code."""
    fenced = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(
        line if line.startswith("#") else re.sub(r"`[^`]*`(?!\])", "", line) for line in fenced.splitlines()
    )


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs make from the headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_troubleshooting_explains_every_reason_and_no_other() -> None:
    explained = re.findall(r"^\| `([A-Z]\w+)` \|", text_of("troubleshooting.md"), re.MULTILINE)
    assert set(explained) == {reason.value for reason in Reason}
    assert len(explained) == len(set(explained))


def test_the_page_on_budgets_explains_every_reason() -> None:
    page = text_of("power-budgets.md")
    assert [reason.value for reason in BudgetReason if f"`{reason.value}`" not in page] == []


def test_troubleshooting_has_a_section_for_every_condition() -> None:
    sections = re.findall(r"^### (.+)$", text_of("troubleshooting.md"), re.MULTILINE)
    assert set(sections) == {kind.value for kind in ConditionType} | {"Events only"}


def test_the_series_of_a_fleet_are_counted_by_what_each_object_has() -> None:
    stated = re.search(
        r"(\d+) for each PerseusJob, (\d+) for each node with GPUs, (\d+) for each job on a\s+node,"
        r" (\d+) for each PowerBudget.*exports\s+(\d+) more for each GPU",
        text_of("metrics.md"),
        re.DOTALL,
    )
    assert stated
    of_job, of_node, of_job_on_node, of_budget, of_gpu = map(int, stated.groups())
    page = text_of("scale.md")
    assert f"{of_node} × nodes + {of_job_on_node} × (jobs on each node" in page
    assert f"{of_job} × PerseusJobs + {of_budget} × PowerBudgets" in page
    assert f"{of_gpu} × GPUs" in page
    nodes, jobs = 12_500, 2_000
    of_fleet = nodes * of_node, nodes * of_job_on_node, jobs * of_job
    section = page.partition("## Metrics of a fleet")[2]
    rows = re.findall(r"^\| [\w ,]+ \| ([\d,]+)(?: more)? \|$", section, re.MULTILINE)
    assert [int(row.replace(",", "")) for row in rows] == [*of_fleet, sum(of_fleet), 8 * nodes * of_gpu]


@pytest.mark.parametrize(("page", "choices"), [("objectives.md", ObjectiveType), ("stragglers.md", StragglerMode)])
def test_every_choice_has_a_section(page: str, choices: type[ObjectiveType] | type[StragglerMode]) -> None:
    assert {choice.value for choice in choices} <= set(re.findall(r"^## (\w+)$", text_of(page), re.MULTILINE))


def test_the_page_on_classes_explains_every_reason() -> None:
    page = text_of("energy-classes.md")
    assert [reason.value for reason in ClassReason if f"`{reason.value}`" not in page] == []


REFERENCE = [("perseusjob.md", JobSpec), ("powerbudget.md", BudgetSpec), ("energyclass.md", ClassSpec)]


@pytest.mark.parametrize(("name", "spec"), REFERENCE)
def test_the_reference_has_every_field(name: str, spec: type[Any]) -> None:
    page = text_of(name)

    def walk(path: str, schema: dict[str, object]) -> None:
        for name, field in schema["properties"].items():  # type: ignore[attr-defined]
            section = re.search(rf"^### {re.escape(path)}$(.*?)(?=^##)", page + "\n##", re.MULTILINE | re.DOTALL)
            assert section, path
            assert f"| `{name}` |" in section[1]
            if "properties" in field:
                walk(f"{path}.{name}", field)

    walk("spec", openapi_of(spec))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    named = set(re.findall(r": ([\w./-]+)$", navigation, re.MULTILINE))
    for page in DOCS.rglob("*.md"):
        path = page.relative_to(DOCS)
        assert str(path) in named or f"{path.parent}/" in named, f"{path} is not in mkdocs.yml"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}: no such heading"

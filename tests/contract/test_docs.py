"""The documentation is up to date: it explains every reason, lists every field, and every link has a target."""

from __future__ import annotations

import pkgutil
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.test_layout import ROOMS
from tests.offenders import ROOT, Offence, no_offenders, text_of

from perseus_operator.api.budget import BudgetReason, BudgetSpec
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.energy_class import ClassReason, ClassSpec
from perseus_operator.api.job import JobSpec, StragglerMode
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.api.schema import openapi_of

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


@cache
def prose(page: Path) -> str:
    """Return the text of a page without its code, line by line as it is there."""
    fenced = re.sub(
        r"^```.*?^```", lambda block: block[0].count("\n") * "\n", text_of(page), flags=re.MULTILINE | re.DOTALL
    )
    return "\n".join(
        line if line.startswith("#") else re.sub(r"`[^`]*`(?!\])", "", line) for line in fenced.splitlines()
    )


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs make from the headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_troubleshooting_explains_every_reason_and_no_other() -> None:
    explained = re.findall(r"^\| `([A-Z]\w+)` \|", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    assert set(explained) == {reason.value for reason in Reason}
    assert len(explained) == len(set(explained))


def test_the_page_on_budgets_explains_every_reason() -> None:
    page = text_of(DOCS / "power-budgets.md")
    assert [reason.value for reason in BudgetReason if f"`{reason.value}`" not in page] == []


def test_troubleshooting_has_a_section_for_every_condition() -> None:
    sections = re.findall(r"^### (.+)$", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    assert set(sections) == {kind.value for kind in ConditionType} | {"Events only"}


def test_the_series_of_a_fleet_are_counted_by_what_each_object_has() -> None:
    stated = re.search(
        r"(\d+) for each PerseusJob, (\d+) for each node with GPUs, (\d+) for each job on a\s+node,"
        r" (\d+) for each\s+ServingPool, (\d+) more for each node that serves, (\d+) for each PowerBudget"
        r".*exports\s+(\d+) more for each GPU",
        text_of(DOCS / "metrics.md"),
        re.DOTALL,
    )
    assert stated
    of_job, of_node, of_job_on_node, of_pool, of_engines, of_budget, of_gpu = map(int, stated.groups())
    page = text_of(DOCS / "scale.md")
    assert f"{of_node} × nodes + {of_job_on_node} × (jobs on each node" in page
    assert f"{of_job} × PerseusJobs + {of_budget} × PowerBudgets" in page
    assert f"{of_pool} × ServingPools + {of_engines} × nodes that serve" in page
    assert f"{of_gpu} × GPUs" in page
    nodes, jobs = 12_500, 2_000
    of_fleet = nodes * of_node, nodes * of_job_on_node, jobs * of_job
    section = page.partition("## Metrics of a fleet")[2]
    rows = re.findall(r"^\| [\w ,]+ \| ([\d,]+)(?: more)? \|$", section, re.MULTILINE)
    assert [int(row.replace(",", "")) for row in rows] == [*of_fleet, sum(of_fleet), 8 * nodes * of_gpu]


@pytest.mark.parametrize(("page", "choices"), [("objectives.md", ObjectiveType), ("stragglers.md", StragglerMode)])
def test_every_choice_has_a_section(page: str, choices: type[ObjectiveType] | type[StragglerMode]) -> None:
    assert {choice.value for choice in choices} <= set(re.findall(r"^## (\w+)$", text_of(DOCS / page), re.MULTILINE))


def test_the_page_on_classes_explains_every_reason() -> None:
    page = text_of(DOCS / "energy-classes.md")
    assert [reason.value for reason in ClassReason if f"`{reason.value}`" not in page] == []


def test_who_follows_the_pages_has_the_class_that_they_name() -> None:
    """A namespace's label does nothing without the webhook, which the chart leaves off."""
    chart = ROOT / "charts" / "perseus"
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    assert not values["webhook"]["enabled"], "else the pages need not say it"
    commands = re.findall(r"helm install (?:.*\\\n)*.*", text_of(DOCS / "install.md"))
    assert len(commands) == 2
    assert all("webhook.enabled=true" in command for command in commands)
    label, said = "perseus.energy/class=default", 0
    for page in (ROOT / "README.md", DOCS / "energy-classes.md", chart / "templates" / "NOTES.txt"):
        text = page.read_text(encoding="utf-8")
        for paragraph in re.split(r"\n\n(?! )", text):
            said += label in paragraph
            assert label not in paragraph or "webhook.enabled" in paragraph, f"{page.name}: {paragraph}"
    assert said == 3


@pytest.mark.parametrize("page", ["README.md", "docs/worth.md"])
@pytest.mark.parametrize("profile", ["GPT-3 175B, A100", "Bloom 176B, A40"])
def test_pages_give_the_savings_that_were_measured(page: str, profile: str) -> None:
    """Those of 12 and 96 microbatches: the most and the least; where they come from is one place."""
    rows = re.findall(rf"^\| {profile}.*", text_of(DOCS / "benchmarks.md"), re.MULTILINE)
    saved = {row.split("|")[2].strip(): row.split("|")[8].strip().removesuffix(" %") for row in rows}
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [saved[count] for count in ("12", "96") if not re.search(rf"\b{saved[count]}\b", text)] == []


REFERENCE = [("perseusjob.md", JobSpec), ("powerbudget.md", BudgetSpec), ("energyclass.md", ClassSpec)]


@pytest.mark.parametrize(("name", "spec"), REFERENCE)
def test_the_reference_has_every_field(name: str, spec: type[Any]) -> None:
    page = text_of(DOCS / name)

    def walk(path: str, schema: dict[str, object]) -> None:
        for name, field in schema["properties"].items():  # type: ignore[attr-defined]
            section = re.search(rf"^### {re.escape(path)}$(.*?)(?=^##)", page + "\n##", re.MULTILINE | re.DOTALL)
            assert section, path
            assert f"| `{name}` |" in section[1]
            if "properties" in field:
                walk(f"{path}.{name}", field)

    walk("spec", openapi_of(spec))


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of(ROOT / "mkdocs.yml").partition("nav:")[2]
    named = set(re.findall(r": ([\w./-]+)$", navigation, re.MULTILINE))
    paths = [page.relative_to(DOCS) for page in PAGES if page.is_relative_to(DOCS)]
    no_offenders(
        Offence(DOCS / path, 1, "it is not in the navigation of mkdocs.yml")
        for path in paths
        if str(path) not in named and f"{path.parent}/" not in named
    )


def test_the_front_doors_list_the_navigation() -> None:
    front_door = runpy.run_path(str(ROOT / "deploy" / "front_door.py"))
    titles = [title for title, _ in front_door["sections"]()]
    for door, text in front_door["front_doors"]().items():
        assert text_of(door) == text, f"{door.name}: run `make generate`"
        assert re.findall(r"^\| ([\w ]+) \| \[", text, re.MULTILINE) == titles


MODULE = re.compile(rf"(?<![\w/.-])perseus_(?:{'|'.join(ROOMS)})\b(?:\.[A-Za-z_]\w*)*")
FILE = re.compile(rf"(?<![\w/.:-])(?:\.ci|docs|tests|deploy|charts|examples|{'|'.join(ROOMS)})/[\w./-]*\w")
OF_THE_HOUSE = [ROOT / "CONTRIBUTING.md", *sorted((DOCS / "design").glob("*.md"))]


@cache
def is_named_rightly(name: str) -> bool:
    """Whether there is a module of this dotted name, or something in a module."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def names_of_nothing(page: Path) -> Iterator[Offence]:
    for number, line in enumerate(text_of(page).splitlines(), 1):
        for name in MODULE.findall(line):
            if not is_named_rightly(name):
                yield Offence(page, number, f"there is no {name}")
        for path in FILE.findall(line):
            if not (ROOT / path).exists():
                yield Offence(page, number, f"there is no {path}")


def test_modules_and_files_that_the_notes_for_developers_name_exist() -> None:
    text = "".join(map(text_of, OF_THE_HOUSE))
    assert len(MODULE.findall(text)) > 100
    assert len(FILE.findall(text)) > 20
    no_offenders(offence for page in OF_THE_HOUSE for offence in names_of_nothing(page))


@pytest.mark.parametrize("room", ["operator", "solver", "agent", "sim"])
def test_the_note_on_rooms_lists_every_package(room: str) -> None:
    title = {"sim": "simulator"}.get(room, room)
    section = text_of(DOCS / "design" / "0001-rooms-and-contracts.md").partition(f"## Packages of the {title}\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    listed = {name.partition(".")[0] for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    package = ROOT / room / f"perseus_{room}"
    present = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed == present - {"__init__"}


def test_the_note_on_rooms_lists_every_room_and_family() -> None:
    note = text_of(DOCS / "design" / "0001-rooms-and-contracts.md")
    rooms = set(re.findall(r"^\| `(\w+)/` \| `(\w+)` \|", note, re.MULTILINE))
    assert rooms == {(room, path.parent.name) for room in ROOMS for path in (ROOT / room).glob("perseus_*/__init__.py")}
    families = re.search(r"^\| `families` \| [^|]*: (.*?); `registry`", note, re.MULTILINE)
    assert families
    listed = set(re.findall(r"`(\w+)`", families[1]))
    assert listed == {path.parent.name for path in (ROOT / "operator/perseus_operator/families").glob("*/__init__.py")}


def links_without_target(page: Path) -> Iterator[Offence]:
    text = prose(page)
    for link in re.finditer(r"\]\(([^)\s]+)\)", text):
        target, line = link[1], text.count("\n", 0, link.start()) + 1
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield Offence(page, line, f"{target} does not exist")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield Offence(page, line, f"{target}: no such heading")


def test_every_link_has_a_target() -> None:
    assert len(PAGES) > 80
    no_offenders(offence for page in PAGES for offence in links_without_target(page))

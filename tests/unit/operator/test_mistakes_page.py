"""Mistakes that the page on troubleshooting lists, each made here: the code answers in the page's words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.doubles.budget_site import Site as BudgetSite
from tests.doubles.budget_site import condition
from tests.doubles.class_site import Site as ClassSite
from tests.doubles.plugin_job import SPEC, Stored, command
from tests.unit.operator.conftest import spec_of
from tests.unit.operator.test_taken_pods import Namespace
from tests.unit.operator.test_workloads import absence_of, failed_pod, state_of

from perseus_core import keys
from perseus_operator.api.conditions import ConditionType
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.families.training.features.stragglers.annotation import parse_annotation
from perseus_operator.families.training.status.unmeasured import why_unmeasured
from perseus_operator.plugin.job import load_job
from perseus_operator.plugin.reports import explanation

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
FIGURE = re.compile(r"\d+(?:\.\d+)?")


def answers() -> set[str]:
    """Return the sentences of the page's table, whose figures depend on the job."""
    [section] = re.findall(r"^## Mistakes.*?(?=^## )", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return {FIGURE.sub("#", row.rpartition("| `")[2].removesuffix("` |")) for row in rows}


async def said(job: Any, make_job: Any, stored: Stored) -> set[str]:
    """Return what the code answers to all mistakes."""
    found = set[str]()

    stored.labels["team-a"] = {keys.LABEL_CLASS: "default"}
    found.add(command("list", "-n", "team-a")[1].splitlines()[1])

    classes = ClassSite()
    classes.run()
    await classes.tick()
    await classes.tick()
    found.add(classes.api.warnings[0][2])

    found.add(why_unmeasured(spec_of(baselineIterations=3), {}))

    budgets = BudgetSite(make_job)
    slowed = budgets.job("a")
    budgets.budget(round(0.8 * budgets.drawn_w("a")))
    await budgets.tick()
    found.add(condition(slowed, ConditionType.READY)[2])

    ended = [{"name": "trainer", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]
    pod = pod_of(failed_pod("train-0", "2030-01-01T00:00:00Z", containerStatuses=ended))
    assert pod is not None
    found.add(absence_of(state_of(spec_of(), [pod])).message)

    job.run()
    job.state.stragglers.declarations_observed(parse_annotation("9:0:1.2"), now_s=job.now_s)
    accepted, rule = condition(job, ConditionType.ACCEPTED)[2], "; that entry does not count."
    found.add(accepted[: accepted.index(rule)] + rule)

    there = Namespace({"reference": {"kind": "Job", "name": "train"}})
    there.run("a", "first")
    there.run("b", "first")
    found.add((await there.said())[1])

    stored.body["spec"] = {**SPEC, "objective": {"type": "MaxThroughput"}}
    stored.body["status"]["plan"]["plannedSlowdown"] = "0.22%"
    found.add(explanation(load_job(stored, "team", "gpt3"))["why"][0]["says"])
    return {FIGURE.sub("#", sentence) for sentence in found}


async def test_every_mistake_of_the_page_has_the_answer_that_the_page_says(
    job: Any, make_job: Any, stored: Stored
) -> None:
    assert await said(job, make_job, stored) == answers()


def test_every_answer_is_one_sentence() -> None:
    assert [answer for answer in answers() if ". " in answer] == []

"""The page: what it says of a job agrees with the solver, and nobody can change or borrow anything through it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.doubles.plugin_pool import pool

from perseus_core import keys
from perseus_core.grain import Grain
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.controller.view import JobView, PoolView, View
from perseus_operator.families.serving.status.explanation import pool_explanation
from perseus_operator.families.training.status.hardware import expected_savings
from perseus_operator.objects.values import JobRef, Json
from perseus_operator.servers.web import responses
from perseus_operator.servers.web.responses import (
    MAX_DRAWN,
    NotThere,
    job_document,
    overview,
    plan_document,
    pool_document,
    pools_overview,
)
from perseus_operator.servers.web.server import Pages, WebServer
from perseus_operator.solving.frontier import SolvedFrontier, open_frontier
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv
from perseus_solver.model.result import Rehearsed

STAGES, MICROBATCHES = 2, 4
REQUEST = SolveRequest(
    profile_csv(STAGES), "1f1b", stages=STAGES, microbatches=MICROBATCHES, chunks=None, blocking_power_mw=83_640,
    points=8,
)  # fmt: skip
SPEC = parse_spec(JobSpec,
    {
        "pipeline": {
            "schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": 3, "tensorParallel": 2
        },
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 83_640},
    }
)  # fmt: skip
STATUS = {
    "conditions": [{"type": "Ready", "status": "False", "reason": "NoPods", "message": "<script>alert(1)</script>"}],
    "stragglers": [{"dataParallelRank": 1, "slowdown": "9.00%", "source": "Declared", "point": 0}],
}

STORED = {
    "metadata": {"namespace": "ns", "name": "llama", "uid": "pool"},
    "spec": {"mode": "Enforce", "objective": {"timePerOutputToken": {"limit": "50ms"}}},
    "status": {
        "replicaCount": 2,
        "replicas": [{"pod": "llama-0", "clockMegahertz": 1200, "limitedBy": "Boost", "attainment": "99.10%"}],
        "savings": {"energy": "31.40%", "low": "28.10%", "high": "34.60%", "blocks": 41, "millijoulesPerToken": 812},
        "conditions": [
            {"type": "Ready", "status": "False", "reason": "NoSignal", "message": "<script>alert(1)</script>"}
        ],
    },
}
POOL = PoolView(JobRef("ns", "llama", "pool", keys.POOL_KIND), STORED)


@pytest.fixture(scope="module")
def solved() -> SolvedFrontier:
    return open_frontier(solve_in_process(REQUEST), REQUEST, digest="d", solve_ms=1, restored=False)


@pytest.fixture(scope="module")
def view(solved: SolvedFrontier) -> JobView:
    return JobView(JobRef("ns", "job", "uid"), SPEC, STATUS, solved)


def test_what_is_not_measured_has_a_reason() -> None:
    def why(status: Json, spec: Json | None = None) -> str:
        stated = SPEC if spec is None else parse_spec(JobSpec, spec)
        return str(overview([JobView(JobRef("ns", "job", "uid"), stated, status, None)])["jobs"][0]["unmeasured"])

    running = {"conditions": [{"type": "Ready", "status": "True", "reason": "PlanInForce", "message": "It runs."}]}
    waiting = {"conditions": [{"type": "Ready", "status": "False", "reason": "NoPods", "message": "No pod runs."}]}
    assert why(waiting) == "No pod runs."
    assert why(running).startswith("No iteration of this shape is measured at default clocks")
    assert why({**running, "savings": {"energy": "3.00%"}}) == ""
    fixed = {"objective": {"type": "FixedClock", "clockMegahertz": 1100}}
    assert "fixed clock" in why(running, fixed)


def test_the_list_says_what_is_wrong() -> None:
    bare = JobView(JobRef("ns", "job", "uid"), None, {}, None)
    other = JobView(JobRef("a", "z", "uid"), SPEC, STATUS, None)
    lines = overview([bare, other])["jobs"]
    assert [(line["name"], line["ready"], line["reason"]) for line in lines] == [
        ("z", "False", "NoPods"), ("job", "Unknown", "")
    ]  # fmt: skip
    assert lines[0]["stragglerCount"] == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "It takes ten comparisons, about two and a half hours after clocks follow the load."),
        ({"Ready": ("False", "NoSignal", "No engine says what it does.")}, "No engine says what it does."),
        ({"ClocksApplied": ("False", "NoLimits", "There is no limit.")}, "There is no limit."),
        (None, "No operator has reported on the pool yet."),
    ],
)
def test_a_pool_without_savings_says_why(said: dict[str, tuple[str, str, str]] | None, why: str) -> None:
    stored = pool(**(said or {}))
    measured = pools_overview([replace(POOL, stored=stored)])["pools"][0]
    assert "unmeasured" not in measured
    del stored["status"]["savings"]
    if said is None:
        stored["status"] = {}
    assert pools_overview([replace(POOL, stored=stored)])["pools"][0]["unmeasured"] == why


def test_a_pool_is_shown_as_the_plugin_explains_it() -> None:
    document = pool_document(POOL)
    assert document == {**pool_explanation(STORED), "conditions": STORED["status"]["conditions"]}  # type: ignore[index]
    assert pools_overview([POOL])["pools"] == [document["summary"]]
    assert document["summary"]["state"] == "NoSignal"
    assert document["replicas"][0]["why"]


def test_a_frontier_is_that_of_the_whole_job(view: JobView, solved: SolvedFrontier) -> None:
    shown = job_document(view)["frontier"]
    assert shown["seconds"] == solved.frontier.time_s.tolist()
    assert shown["joules"] == pytest.approx(6 * solved.frontier.energy_j)
    assert shown["gpus"] == 6 * STAGES
    # No plan is faster than every GPU at its highest clock, and the fastest plan takes no more energy than that.
    assert shown["highestClocks"]["seconds"] == pytest.approx(shown["seconds"][0], rel=1e-6)
    assert shown["highestClocks"]["joules"] >= shown["joules"][0]


@pytest.fixture(scope="module")
def deployed(solved: SolvedFrontier) -> SolvedFrontier:
    """The same as it is stored once it was rehearsed: kept times, and what the hardware costs in the energies."""
    frontier, share = solved.frontier, np.zeros(len(solved.frontier))
    rehearsed = Rehearsed(
        confidence=0.95, grains=(Grain.INSTRUCTION,) * len(frontier), p50_s=1.005 * frontier.time_s,
        ideal_time_s=frontier.time_s, ideal_energy_j=frontier.energy_j, below_share=share, above_share=share,
    )  # fmt: skip
    frontier = replace(frontier, time_s=1.01 * frontier.time_s, energy_j=1.02 * frontier.energy_j, rehearsed=rehearsed)
    view = replace(
        solved.view,
        times_us=tuple(round(1e6 * one) for one in frontier.time_s.tolist()),
        energies_mj=tuple(round(1e3 * one) for one in frontier.energy_j.tolist()),
        grains=("Instruction",) * len(frontier),
    )
    return replace(solved, frontier=frontier, view=view)


def test_the_page_states_what_the_status_does(view: JobView, deployed: SolvedFrontier) -> None:
    shown = job_document(replace(view, solved=deployed))["frontier"]
    for point in range(len(deployed.frontier)):
        saved = 100 * (1 - shown["joules"][point] / shown["highestClocks"]["joules"])
        stated = expected_savings(deployed.view, point)
        assert stated is not None
        assert saved == pytest.approx(float(stated.rstrip("%")), abs=0.006)
        assert shown["seconds"][point] == pytest.approx(deployed.view.times_us[point] / 1e6, abs=1e-6)
        # The timetable is that of clocks that change at once.
        plan, expectation = plan_document(replace(view, solved=deployed), point), deployed.frontier[point].expectation
        assert expectation is not None
        assert plan["iterationSeconds"] == pytest.approx(expectation.ideal_time_s)
    assert shown["gaps"] == pytest.approx(deployed.frontier.gap)
    assert shown["rehearsed"]


def test_a_timetable_is_feasible_and_adds_up(view: JobView, solved: SolvedFrontier) -> None:
    for point in range(len(solved.frontier)):
        plan = plan_document(view, point)
        assert plan["iterationSeconds"] == pytest.approx(solved.frontier.time_s[point])
        busy_j = busy_s = 0.0
        assert max(i[6] for stage in plan["stages"] for i in stage) <= plan["highestWatts"] + 1e-9
        for stage in plan["stages"]:
            assert len(stage) == 2 * MICROBATCHES
            for before, after in pairwise(stage):
                assert after[3] >= before[3] + before[4] - 1e-9
            busy_j += sum(i[4] * i[6] for i in stage)
            busy_s += sum(i[4] for i in stage)
        waiting_j = plan["blockingWatts"] * (STAGES * plan["iterationSeconds"] - busy_s)
        assert busy_j + waiting_j == pytest.approx(solved.frontier.energy_j[point], rel=1e-6)


def test_what_cannot_be_drawn_is_said(view: JobView, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotThere, match="points 0 to"):
        plan_document(view, 10_000)
    with pytest.raises(NotThere, match="no frontier yet"):
        plan_document(replace(view, solved=None), 0)
    monkeypatch.setattr(responses, "MAX_DRAWN", 15)
    with pytest.raises(NotThere, match="16 instructions is not drawn; at most 15 are"):
        plan_document(view, 0)
    assert MAX_DRAWN >= 8 * 96 * 2 * 2


class Page:
    """A server, and what it answers."""

    def __init__(self, views: Sequence[View]) -> None:
        self.views = list(views)
        self.busy = False
        self.server = WebServer("127.0.0.1:0", Pages(self._views))

    def _views(self) -> Sequence[View]:
        if self.busy:
            raise TimeoutError
        return self.views

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.address, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = (answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return found

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="module")
def page(view: JobView) -> Iterator[Page]:
    served = Page([view, POOL])
    yield served
    served.server.close()


def test_documents_and_the_files_are_served(page: Page) -> None:
    assert page.json("/api/jobs")["jobs"][0]["name"] == "job"
    assert page.json("/api/jobs/ns/job")["stragglers"][0]["slowdown"] == "9.00%"
    assert page.json("/api/jobs/ns/job/plans/3?x=1")["point"] == 3
    assert page.json("/api/pools")["pools"][0]["name"] == "llama"
    assert page.json("/api/pools/ns/llama")["summary"]["savings"]["energy"] == "31.40%"
    for path in ("/", *(f"/static/{name}" for name in ("app.js", "charts.js", "pools.js", "tables.js", "app.css"))):
        status, _, body = page.ask(path)
        assert (status, len(body) > 500) == (200, True)
        assert page.ask(path, "HEAD")[2] == b""


@pytest.mark.parametrize(
    "path",
    ["/x", "/static/../server.py", "/static/%2e%2e/server.py", "//etc/passwd", "/api/jobs/ns/other",
     "/api/jobs/ns/job/plans/-1", "/api/jobs/ns/job/plans/999999", "/api/jobs/<b>/job",
     "/api/pools/ns/job", "/api/jobs/ns/llama", "/api/pools/ns/llama/plans/0"],
)  # fmt: skip
def test_nothing_else_is_and_what_was_asked_is_not_repeated(page: Page, path: str) -> None:
    status, headers, body = page.ask(path)
    assert status == 404
    assert headers["Content-Type"] == "application/json"
    assert b"<" not in body
    assert b"import" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_it_is_read_only(page: Page, method: str) -> None:
    assert page.ask("/api/jobs/ns/job", method)[0] == 501


def test_scripts_from_elsewhere_are_refused_and_it_cannot_be_framed(page: Page) -> None:
    for path in ("/", "/api/jobs", "/nothing"):
        _, headers, _ = page.ask(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Python" not in headers["Server"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9473", "localhost.evil.example", ""])
def test_a_name_that_was_pointed_at_loopback_is_refused(page: Page, host: str) -> None:
    assert page.ask("/api/jobs", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:9473", "[::1]:9473"])
def test_a_forwarded_port_is_served(page: Page, host: str) -> None:
    assert page.ask("/api/jobs", Host=host)[0] == 200


def test_a_busy_operator_is_said_to_be_busy(page: Page) -> None:
    page.busy = True
    assert page.ask("/api/jobs")[0] == 503
    page.busy = False
    assert page.ask("/api/jobs")[0] == 200


def test_a_document_that_cannot_be_made_is_an_answer(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    page.views.append(JobView(None, None, {}, None))  # type: ignore[arg-type]
    assert page.ask("/api/jobs")[0] == 500
    page.views.pop()
    assert "could not be answered" in caplog.text

"""The page where strangers reach it: viewers see the jobs whose PerseusJobs they may get, and nobody sees another."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator

import pytest
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_operator.controller.view import JobView, PoolView, View
from perseus_operator.errors import KubeForbidden
from perseus_operator.objects.values import JobRef, User
from perseus_operator.servers.web import access
from perseus_operator.servers.web.access import MAX_TOKEN, Access
from perseus_operator.servers.web.server import Pages, WebServer

JOBS = {("team-a", "one"), ("team-a", "two"), ("team-b", "one"), ("team-c", "three")}
ANN, BOB, ADMIN = User("ann"), User("bob", groups=("b",)), User("admin")


class ApiServer:
    """Says who holds a token and what they may do; counts what it is asked."""

    def __init__(self) -> None:
        self.tokens = {"ann-1": ANN, "bob-1": BOB, "admin-1": ADMIN}
        self.rights: dict[User, set[str]] = {ANN: {"team-a"}, BOB: {"team-a", "team-b"}, ADMIN: {""}}
        self.denied: set[str] = set()
        """Kinds that nobody may get."""
        self.asked = 0
        self.hangs = threading.Event()
        self.hangs.set()
        self.fails: Exception | None = None

    def user_of(self, token: str) -> User | None:
        self.asked += 1
        if token.startswith("slow"):
            self.hangs.wait(60)
        if self.fails:
            raise self.fails
        return self.tokens.get(token)

    def may_get(self, user: User, plural: str, namespace: str) -> bool:
        self.asked += 1
        return plural not in self.denied and bool(self.rights[user] & {namespace, ""})


class Page:
    """The page behind a login, and the time that its memory goes by."""

    def __init__(self) -> None:
        self.api = ApiServer()
        self.now_s = 0.0
        views: list[View] = []
        for namespace, name in sorted(JOBS):
            views.append(JobView(JobRef(namespace, name, f"{namespace}-{name}"), None, {}, None))
            metadata = {"namespace": namespace, "name": f"{name}-pool"}
            views.append(PoolView(JobRef(**metadata, uid="", kind=keys.POOL_KIND), {"metadata": metadata}))
        self.server = WebServer("127.0.0.1:0", Pages(lambda: views), Access(self.api, lambda: self.now_s))

    def ask(self, path: str, authorization: str | None = None) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(self.server.address, timeout=60)
        connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found

    def pools(self, token: str) -> set[str]:
        status, _, body = self.ask("/api/pools", f"Bearer {token}")
        assert status == 200, body
        return {pool["namespace"] for pool in json.loads(body)["pools"]}

    def jobs(self, token: str) -> set[tuple[str, str]]:
        status, _, body = self.ask("/api/jobs", f"Bearer {token}")
        assert status == 200, body
        return {(job["namespace"], job["name"]) for job in json.loads(body)["jobs"]}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setattr(access, "_PATIENCE_S", PATIENCE_S)
    served = Page()
    yield served
    served.api.hangs.set()
    served.server.close()


@pytest.mark.parametrize(
    ("token", "namespaces"),
    [("ann-1", {"team-a"}), ("bob-1", {"team-a", "team-b"}), ("admin-1", {"team-a", "team-b", "team-c"})],
)
def test_each_sees_the_jobs_of_their_namespaces_by_every_path(page: Page, token: str, namespaces: set[str]) -> None:
    assert page.jobs(token) == {job for job in JOBS if job[0] in namespaces}
    for namespace, name in JOBS:
        status, _, body = page.ask(f"/api/jobs/{namespace}/{name}", f"Bearer {token}")
        assert status == (200 if namespace in namespaces else 404)
        plan_status, _, plan = page.ask(f"/api/jobs/{namespace}/{name}/plans/0", f"Bearer {token}")
        assert plan_status == 404
        assert (b"no frontier yet" in plan) == (namespace in namespaces)
        if status == 404:
            other = page.ask(f"/api/jobs/{namespace}/is-not-there", f"Bearer {token}")[2]
            assert body.replace(name.encode(), b"is-not-there") == other, "it does not tell which jobs there are"


def test_who_may_get_pools_sees_those_of_their_namespaces_and_no_job_for_it(page: Page) -> None:
    assert page.pools("ann-1") == {"team-a"}
    assert page.pools("admin-1") == {"team-a", "team-b", "team-c"}
    assert page.ask("/api/pools/team-a/one-pool", "Bearer ann-1")[0] == 200
    hidden = page.ask("/api/pools/team-b/one-pool", "Bearer ann-1")
    absent = page.ask("/api/pools/team-b/two-pool", "Bearer ann-1")
    assert hidden[0] == absent[0] == 404
    assert hidden[2].replace(b"one", b"two") == absent[2]
    page.api.denied, page.now_s = {keys.POOL_PLURAL}, 31.0
    assert page.pools("ann-1") == set()
    assert page.jobs("ann-1"), "a right to one kind is none to the other"
    assert page.ask("/api/pools/team-a/one-pool", "Bearer ann-1")[0] == 404


@pytest.mark.parametrize(
    ("authorization", "why"),
    [
        (None, "a token is needed"),
        ("", "a token is needed"),
        ("Bearer", "a token is needed"),
        ("Bearer  ", "a token is needed"),
        ("Basic YW5uOg==", "a token is needed"),
        ("ann-1", "a token is needed"),
        ("Bearer nobody", "does not accept this token"),
        ("Bearer " + "x" * (MAX_TOKEN + 1), f"at most {MAX_TOKEN}"),
    ],
)
def test_without_a_users_token_there_are_the_files_alone(page: Page, authorization: str | None, why: str) -> None:
    for path in ("/api/jobs", "/api/jobs/team-a/one", "/api/jobs/team-a/one/plans/0", "/else"):
        status, headers, body = page.ask(path, authorization)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert why in json.loads(body)["error"]
    status, headers, _ = page.ask("/", authorization)
    assert (status, headers["WWW-Authenticate"]) == (200, None)


def test_rights_and_tokens_that_are_taken_away_end_within_half_a_minute(page: Page) -> None:
    assert page.jobs("bob-1") == {job for job in JOBS if job[0] != "team-c"}
    asked = page.api.asked
    page.now_s = 29.0
    page.api.rights[BOB] = {"team-b"}
    assert page.jobs("bob-1") == {job for job in JOBS if job[0] != "team-c"}
    assert page.api.asked == asked, "remembered"
    page.now_s = 31.0
    assert page.jobs("bob-1") == {("team-b", "one")}
    del page.api.tokens["bob-1"]
    page.now_s = 62.0
    assert page.ask("/api/jobs", "Bearer bob-1")[0] == 401


def test_a_right_that_is_used_all_the_time_is_asked_for_again(page: Page) -> None:
    """It is remembered from when it was asked for, not from when it was used last."""
    page.api.rights[ANN] = {"team-a"}
    for second in range(60):
        page.now_s = float(second)
        if second == 1:
            page.api.rights[ANN] = set()
        assert (page.jobs("ann-1") == set()) == (second >= 30)


def test_made_up_tokens_wait_for_each_other_and_keep_no_viewer_out(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.jobs("ann-1")
    monkeypatch.setattr(access, "_PATIENCE_S", 0.05)  # of strangers whom a token that hangs keeps waiting
    page.api.hangs.clear()
    asked = page.api.asked
    statuses: list[int] = []
    strangers = [
        threading.Thread(target=lambda n=n: statuses.append(page.ask("/api/jobs", f"Bearer slow-{n}")[0]))
        for n in range(8)
    ]
    for stranger in strangers:
        stranger.start()
    eventually(lambda: len(statuses) == len(strangers) - 1, "strangers are not turned away")
    assert statuses == [503] * 7
    assert page.api.asked == asked + 1, "the API server is asked about one at a time"
    assert page.jobs("ann-1") == {("team-a", "one"), ("team-a", "two")}
    page.api.hangs.set()
    for stranger in strangers:
        stranger.join()
    assert statuses[-1] == 401


def test_an_api_server_that_does_not_answer_opens_nothing(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    page.api.fails = KubeForbidden("403 Forbidden: tokenreviews")
    status, _, body = page.ask("/api/jobs", "Bearer admin-1")
    assert status == 503
    assert b"team" not in body
    assert "403 Forbidden: tokenreviews" in caplog.text
    page.api.fails = None
    assert page.jobs("admin-1") == JOBS, "a failure is not remembered"


def test_nothing_is_served_without_a_login_where_others_reach_it() -> None:
    with pytest.raises(ValueError, match="needs a login"):
        WebServer("0.0.0.0:0", Pages(list))

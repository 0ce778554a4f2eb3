"""What others write over our words: an operator that slept and wakes, somebody by hand. The watch is late and leaves
out; in the end what is stored is what this operator says, or it has heard that a newer one speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.conftest import LIMITS, Job, spec_of

from perseus_operator.conditions import Reason
from perseus_operator.errors import KubeUnavailable
from perseus_operator.metrics import Metrics
from perseus_operator.planner import Now
from perseus_operator.reporter import Reporter
from perseus_operator.services import Pace, Services
from perseus_operator.stored import Stored, is_newer
from perseus_proto import keys

ANNOTATION = keys.ANNOTATION_PLANNED_SLOWDOWN
EPOCH = 5


class Server:
    """An API server with one PerseusJob, all of whose versions it remembers; and a reporter that writes there."""

    def __init__(self) -> None:
        self.job = Job()
        self.job.run()
        self.versions: list[tuple[dict[str, Any], dict[str, str]]] = [({}, {})]
        self.brought = 0
        """The version that the watch has brought last."""
        self.newest_epoch: int | Exception = EPOCH
        self.answers = True
        """Whether who writes hears of it."""
        self.events: list[str] = []
        self._spawned: list[Coroutine[Any, Any, None]] = []
        kube = SimpleNamespace(write_status=self._write_status, annotate=self._annotate, post_event=self._post)
        services = SimpleNamespace(
            kube=kube,
            metrics=Metrics(),
            limits=LIMITS,
            status_interval_s=0.0,
            figures=Pace(1e6),
            monotonic_s=lambda: self.job.now_s,
            epoch=EPOCH,
            newest_epoch=self._newest_epoch,
        )
        self.reporter = Reporter(self.job.state.ref, cast(Services, services), self._spawned.append)
        self.reporter.recall({}, {}, "0")

    @property
    def status(self) -> dict[str, Any]:
        return self.versions[-1][0]

    @property
    def annotations(self) -> dict[str, str]:
        return self.versions[-1][1]

    def store(self, *, status: dict[str, Any] | None = None, annotations: dict[str, str] | None = None) -> str:
        """A write; one that changes nothing makes no version, as on a real server."""
        wanted = (self.status if status is None else status, self.annotations if annotations is None else annotations)
        if wanted != self.versions[-1]:
            self.versions.append(wanted)
        if not self.answers:
            raise KubeUnavailable("timed out")
        return str(len(self.versions) - 1)

    def bring(self, version: int) -> bool:
        """The watch: in order, but not every version."""
        self.brought = max(self.brought, version)
        return self.reporter.hear(*self.versions[self.brought], str(self.brought))

    async def think(self) -> None:
        self.job.now_s += 60  # beyond every pause
        self.reporter.tell(self.job.state, self.job.settle(), Now(self.job.now_s, self.job.wall_s))
        while self._spawned:
            await self._spawned.pop()

    async def settle(self) -> None:
        """Until the watch has nothing more to bring, and nothing more is written."""
        for _ in range(8):
            before = len(self.versions)
            self.bring(len(self.versions) - 1)
            await self.think()
            if len(self.versions) == before:
                return
        raise AssertionError("still writing")

    async def _write_status(self, ref: Any, status: dict[str, Any]) -> str:
        return self.store(status=status)

    async def _annotate(self, ref: Any, annotations: dict[str, str | None]) -> str:
        merged = {k: v for k, v in {**self.annotations, **annotations}.items() if v is not None}
        return self.store(annotations=merged)

    async def _post(self, ref: Any, *, kind: str, reason: str, message: str) -> None:
        self.events.append(reason)

    async def _newest_epoch(self) -> int:
        if isinstance(self.newest_epoch, Exception):
            raise self.newest_epoch
        return self.newest_epoch


MOVES = st.lists(st.sampled_from(["edit", "think", "lost", "bring", "skip", "stale", "more", "strip"]), max_size=14)


@settings(max_examples=60)
@given(MOVES, st.randoms(use_true_random=False))
def test_whatever_others_write_and_however_late_we_hear_of_it_our_words_stay(moves: list[str], dice: Any) -> None:
    async def play() -> None:
        server = Server()
        for number, move in enumerate(moves):
            match move:
                case "edit":
                    server.job.state.generation += 1
                    server.job.state.accept(spec_of(objective={"type": dice.choice(["MinEnergy", "MaxThroughput"])}))
                case "think":
                    await server.think()
                case "lost":
                    server.answers = False
                    await server.think()
                    server.answers = True
                case "bring":
                    server.bring(min(server.brought + 1, len(server.versions) - 1))
                case "skip":
                    server.bring(dice.randint(server.brought, len(server.versions) - 1))
                case "stale":  # an operator that believes what was so some time ago
                    server.store(status=dice.choice(server.versions)[0])
                case "more":
                    server.store(status={**server.status, "stragglers": [{"dataParallelRank": number}]})
                case "strip":
                    server.store(annotations={})
        await server.settle()
        alone = Server()
        alone.job.state.generation = server.job.state.generation
        assert server.job.state.spec is not None
        alone.job.state.accept(server.job.state.spec)
        await alone.settle()
        assert plain(server.status) == plain(alone.status)
        assert server.annotations.keys() == {ANNOTATION}
        assert server.annotations == alone.annotations

    asyncio.run(play())


def plain(status: dict[str, Any]) -> dict[str, Any]:
    """Without times."""
    conditions = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}
    return {**status, "conditions": conditions}


async def test_our_own_words_coming_back_are_no_news_and_cost_no_write() -> None:
    server = Server()
    await server.settle()
    for edit in ("MinEnergy", "MaxThroughput"):
        server.job.state.generation += 1
        server.job.state.accept(spec_of(objective={"type": edit}))
        await server.think()
        written = len(server.versions)
        for version in range(written):
            assert not server.bring(version)
            await server.think()
        assert len(server.versions) == written


async def test_who_hears_others_speak_and_finds_a_newer_operator_is_silent() -> None:
    server = Server()
    await server.settle()
    server.newest_epoch = EPOCH + 1
    server.store(status={**server.status, "observedGeneration": 7})
    assert server.bring(len(server.versions) - 1)
    await server.settle()
    assert server.status["observedGeneration"] == 7
    assert server.job.state.fenced is not None
    assert server.job.state.fenced.reason is Reason.FENCED
    assert f"its epoch is {EPOCH + 1}, not {EPOCH}" in server.job.state.fenced.message
    assert server.job.plan().actions == (), "hands off, too"


async def test_who_cannot_ask_whether_a_newer_operator_has_begun_waits_until_it_can() -> None:
    server = Server()
    await server.settle()
    server.newest_epoch = KubeUnavailable("503")
    theirs = {**server.status, "observedGeneration": 7}
    server.store(status=theirs)
    await server.settle()
    assert server.status == theirs
    server.newest_epoch = EPOCH
    await server.settle()
    assert server.status["observedGeneration"] == 1


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("1", "", True), ("b", "a", True), ("a", "a", False)],
)
def test_versions_are_numbers_where_they_can_be(version: str, than: str, newer: bool) -> None:
    assert is_newer(version, than) is newer


def test_an_answer_that_comes_after_newer_news_does_not_count() -> None:
    stored = Stored("")
    stored.write("ours")
    assert stored.heard("theirs", "12")
    stored.wrote("11")
    assert stored.value == "theirs"
    stored.write("ours again")
    assert not stored.heard("ours again", "13"), "our own, before its answer"
    stored.wrote("13")
    assert stored.value == "ours again"

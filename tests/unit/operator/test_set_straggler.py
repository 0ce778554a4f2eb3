"""set_straggler by RPC: which job is meant, what is written, and what happens when others write too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from perseus_core import keys
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.controller.set_straggler import ObservedJob, StragglerRequest, set_straggler
from perseus_operator.errors import InvalidSpec, KubeConflict, KubeUnavailable, StaleEpoch, UnknownJob
from perseus_operator.families.training.training import Training
from perseus_operator.objects.values import JobRef

EPOCH = 5


class Runner:
    """The keeper of a job, as far as telling needs it."""

    def __init__(self, state: Training, annotation: str = "") -> None:
        self.ref, self.job, self.epoch = state.ref, state.job, EPOCH
        self.observed = ObservedJob("1", annotation)
        self.status: Mapping[str, Any] = {"measured": {"iterationTimeMicroseconds": 2_000_000}}


class Api:
    """An API server with one object, and others who write to it."""

    def __init__(self, runner: Runner, rivals: int = 0) -> None:
        self.runner, self.rivals = runner, rivals
        self.stored, self.writes = runner.observed, 0

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> None:
        self.writes += 1
        if self.rivals:
            self.rivals -= 1
            self.stored = ObservedJob(f"{int(self.stored.version) + 1}", f"9:0:1.{1 + self.rivals}")
            asyncio.get_running_loop().call_later(0.01, setattr, self.runner, "observed", self.stored)
        if version != self.stored.version:
            raise KubeConflict("the object has been modified")
        assert list(annotations) == [keys.ANNOTATION_STRAGGLER]
        self.stored = ObservedJob(f"{int(self.stored.version) + 1}", annotations[keys.ANNOTATION_STRAGGLER] or "")


@pytest.fixture
def runner(job: Any) -> Runner:
    job.run()
    return Runner(job.state)


def tell(request: StragglerRequest, api: Api) -> tuple[JobRef, str]:
    declared = asyncio.run(set_straggler(request, [api.runner], api))
    assert declared.epoch == EPOCH
    return declared.ref, declared.annotation


def test_any_gpu_of_the_pipeline_names_the_job(runner: Runner) -> None:
    api = Api(runner)
    ref, annotation = tell(StragglerRequest("GPU-1-0", 1.2, delay_s=30.0), api)
    assert ref == runner.ref
    assert annotation == api.stored.annotation == "GPU-1-0:30:1.2"


def test_a_rank_needs_its_job_and_a_delay_in_iterations_what_one_takes(runner: Runner) -> None:
    api = Api(runner)
    assert tell(StragglerRequest("1", 1.5, delay_iterations=3, job=("ns", "job")), api)[1] == "1:6:1.5"
    runner.observed, runner.status = api.stored, {}
    with pytest.raises(InvalidSpec, match="delay_iterations: the time of an iteration is not known yet"):
        tell(StragglerRequest("1", 1.5, delay_iterations=3, job=("ns", "job")), api)
    assert tell(StragglerRequest("1", 1.0, job=("ns", "job")), api)[1] == "", "back to normal"


def test_the_same_declaration_twice_is_one_declaration(runner: Runner) -> None:
    api = Api(runner)
    tell(StragglerRequest("1", 1.2, job=("ns", "job")), api)
    runner.observed = api.stored
    tell(StragglerRequest("1", 1.2, job=("ns", "job")), api)
    assert api.writes == 1


def test_what_others_write_meanwhile_is_kept(runner: Runner) -> None:
    api = Api(runner, rivals=2)
    assert tell(StragglerRequest("1", 1.2, job=("ns", "job")), api)[1] == "9:0:1.1,1:0:1.2"
    assert api.stored.annotation == "9:0:1.1,1:0:1.2"


def test_a_request_that_loses_every_race_fails_and_writes_nothing(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus_operator.controller.set_straggler._WATCH_WAIT_S", 0.04)
    api = Api(runner, rivals=99)
    with pytest.raises(KubeConflict):
        tell(StragglerRequest("1", 1.2, job=("ns", "job")), api)
    assert "1:0:1.2" not in api.stored.annotation


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (StragglerRequest("1", 1.2, job=("ns", "other")), UnknownJob, "serves no PerseusJob ns/other"),
        (StragglerRequest("GPU-x", 1.2), UnknownJob, "no job that this operator serves trains on 'GPU-x'"),
        (StragglerRequest("1", 1.2), InvalidSpec, "job: must be named if id is a data-parallel rank"),
        (
            StragglerRequest("2", 1.2, job=("ns", "job")),
            InvalidSpec,
            "id: the job has data-parallel ranks 0 to 1, not 2",
        ),
        (
            StragglerRequest("1", 0.5, job=("ns", "job")),
            InvalidSpec,
            "slowdown must be from 1 (back to normal) to 100, not 0.5",
        ),
        (StragglerRequest("1", float("nan"), job=("ns", "job")), InvalidSpec, "not '1:0:nan'"),
        (StragglerRequest("x y", 1.2, job=("ns", "job")), InvalidSpec, "must be <data-parallel rank or GPU UUID>"),
        (StragglerRequest("1", 1.2, job=("ns", "job"), epoch=EPOCH + 1), StaleEpoch, "the request requires 6 or later"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(
    runner: Runner, request_: StragglerRequest, error: type[Exception], said: str
) -> None:
    api = Api(runner)
    with pytest.raises(error) as refused:
        tell(request_, api)
    assert said in str(refused.value)
    assert api.writes == 0


def test_an_operator_that_was_replaced_refuses(runner: Runner) -> None:
    runner.job.fenced = Explanation(Reason.FENCED, "A newer operator commands this job")
    with pytest.raises(StaleEpoch, match="A newer operator"):
        tell(StragglerRequest("1", 1.2, job=("ns", "job")), Api(runner))


def test_an_api_server_that_is_away_is_said(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(runner)

    async def away(*_: Any, **__: Any) -> None:
        raise KubeUnavailable("503")

    monkeypatch.setattr(api, "annotate", away)
    with pytest.raises(KubeUnavailable):
        tell(StragglerRequest("1", 1.2, job=("ns", "job")), api)

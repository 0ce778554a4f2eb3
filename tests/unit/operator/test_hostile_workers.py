"""What a compromised worker of the solver service can do: its answers are bounded by the question, read off the event
loop, and believed only as far as the job's own inputs and iterations bear them out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.errors import AnswerRefused, SolveFailed
from perseus_operator.families.training.features.frontier.inputs import Solve, inputs_digest
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work.calibrator import Calibrator
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.objects.values import JobRef
from perseus_operator.solving import process
from perseus_operator.solving.answers import most_calibration_bytes, most_frontier_bytes
from perseus_operator.solving.calibration import (
    CalibrateRequest,
    CheckRequest,
    calibrate_in_process,
    check_in_process,
    parse_calibration_result,
)
from perseus_operator.solving.messages import InvalidAnswer, verdict_of
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.process import Outcome, Task, Verdict, run_worker
from perseus_operator.solving.request import SolveRequest, profile_of, schedule_of
from perseus_operator.solving.slots import FairSlots
from perseus_operator.solving.worker import solve_in_process
from perseus_proto.v1alpha1 import solver_pb2
from perseus_sim.profiles import profile_csv
from perseus_solver.calibration import Calibration
from perseus_solver.calibration.replay import Replay
from perseus_solver.errors import SolverError

pytestmark = pytest.mark.usefixtures("short_search")

INPUTS = SolveRequest(profile_csv(2), "1f1b", 2, 4, None, 83_640, 12)
OVERHEAD_S = 0.05


def recorded() -> CalibrateRequest:
    """Iterations of a pipeline whose messages take no time, with an overhead, under nine plans."""
    random = np.random.default_rng(1)
    schedule = schedule_of(INPUTS, profile_of(INPUTS))
    replay, plan = Replay(schedule), np.repeat(np.arange(9, dtype=np.int32), 4)
    planned_s = np.repeat(random.uniform(0.02, 0.04, (9, schedule.instructions)), 4, axis=0)
    duration_s = planned_s * random.normal(1.0, 0.001, planned_s.shape)
    time_s = replay.time_s(duration_s, np.zeros(replay.parameters)) + OVERHEAD_S
    return CalibrateRequest(INPUTS, plan, duration_s, time_s, planned_s)


ASKED = recorded()


@cache
def honest_answer() -> bytes:
    return calibrate_in_process(ASKED)


@pytest.fixture
def honest() -> bytes:
    return honest_answer()


class Service:
    """Workers that answer what a test says."""

    def __init__(self, answer: bytes) -> None:
        self.slots = FairSlots(1)
        self.answer, self.allowed = answer, list[int]()

    async def run(self, task: Task, request: bytes, most_bytes: int) -> Verdict:
        self.allowed.append(most_bytes)
        return Verdict(Outcome.ANSWERED, self.answer)


def pool_of(answer: bytes) -> SolverPool:
    return SolverPool(workers=1, timeout_s=60, memory_mib=8192, service=Service(answer))


def checked(answer: bytes) -> dict[str, Any]:
    document = json.loads(check_in_process(CheckRequest.from_bytes(CheckRequest(ASKED.to_bytes(), answer).to_bytes())))
    assert isinstance(document, dict)
    return document


def forged(honest: bytes, **changes: Any) -> bytes:
    answer = json.loads(honest)
    answer["calibration"] = json.dumps({**json.loads(answer["calibration"]), **changes})
    return json.dumps(answer).encode()


def test_an_honest_calibration_is_unchanged_by_its_check(honest: bytes) -> None:
    assert checked(honest) == json.loads(honest)
    assert Calibration.from_json(json.loads(honest)["calibration"]).explains


@pytest.mark.parametrize(
    "changes",
    [
        {"allowance": 0.0},
        {"allowance": 1e6},
        {"noise": [], "stage_noise": [9.0, 9.0]},
        {"reason": "because I say so"},
        {"quality": {}},
        {"heldout_mape_percent": 0.0},
    ],
)
def test_nothing_but_delays_is_taken_from_a_calibration(honest: bytes, changes: dict[str, Any]) -> None:
    if "quality" in changes:
        known = json.loads(json.loads(honest)["calibration"])["quality"]
        changes = {"quality": {**known, "replay_mape_percent": 99.0, "fitted_mape_percent": 0.0}}
    assert checked(forged(honest, **changes)) == json.loads(honest)


@pytest.mark.parametrize("overhead_s", [0.0, 1.0, 1e300])
def test_delays_that_do_not_explain_the_iterations_are_not_planned_with(honest: bytes, overhead_s: float) -> None:
    found = checked(forged(honest, overhead_s=overhead_s))
    assert json.loads(found["calibration"])["verdict"] == "does not explain"


@pytest.mark.parametrize("change", [0.0, 1e9, -1, None])
def test_by_how_much_predictions_change_is_computed_here(honest: bytes, change: float | None) -> None:
    assert checked(json.dumps({**json.loads(honest), "change": change}).encode()) == json.loads(honest)


BAD_ANSWERS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"calibration": 5, "change": 0}',
    b'{"calibration": "{}", "change": "1"}',
    b'{"calibration": "{}", "change": true}',
    b'{"calibration": "{}"}',
    b'{"calibration": "' + b"[" * 50_000 + b'", "change": null}',
    b'{"calibration": "{\\"version\\": 1e999}", "change": NaN}',
]


@pytest.mark.parametrize("answer", BAD_ANSWERS)
def test_an_answer_that_is_none_is_one_error(answer: bytes) -> None:
    with pytest.raises(SolveFailed):
        parse_calibration_result(answer)
    with pytest.raises(SolverError):
        checked(answer)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()), st.data())
def test_whatever_bytes_are_answered_there_is_one_error(noise: bytes, data: st.DataObject) -> None:
    field = data.draw(
        st.sampled_from(["version", "stages", "edge_delay_s", "stage_gap_s", "quality", "noise", "verdict"])
    )
    mutated = forged(honest_answer(), **{field: data.draw(json_values)})
    for answer in (noise, mutated):
        with suppress(SolveFailed):
            parse_calibration_result(answer)


async def test_the_pool_uses_no_calibration_that_does_not_bear_a_check(honest: bytes) -> None:
    assert json.loads(await pool_of(honest).calibrate(ASKED)) == json.loads(honest)
    with pytest.raises(AnswerRefused, match="the answer of the solver service is not used"):
        await pool_of(b'{"calibration": "[[[[", "change": 0}').calibrate(ASKED)


def test_a_service_whose_answer_was_refused_is_asked_again_after_pauses_that_double(job: Any) -> None:
    """Seeds of the simulation in which it had lied once: there was no plan before the inputs changed."""
    inputs, solve = job.state.inputs, job.state.solve
    inputs.read_at_s, inputs.profile_digest = job.now_s, "csv"
    wanted = Solve(inputs_digest(job.spec, "csv"))
    refused = Explanation(Reason.SOLVE_FAILED, "it is not so")
    for pause_s in (5, 10, 20, 40, 80, 160, 320, 600, 600):
        assert wanted in job.decide().actions
        solve.refused(wanted.digest, refused, now_s=job.now_s)
        made = job.decide()
        assert wanted not in made.actions
        assert made.wake_at_s <= job.now_s + pause_s
        job.now_s += pause_s - 0.01
        assert wanted not in job.decide().actions
        job.now_s += 0.01
    solve.failed(wanted.digest, refused)
    job.now_s += 1e6
    assert wanted not in job.decide().actions, "what cannot be solved is not tried again"
    solve.refused(wanted.digest, refused, now_s=job.now_s)
    job.now_s += 5
    assert wanted in job.decide().actions, "pauses are short again"


async def test_a_bad_answer_is_a_fault_of_the_calibration_and_nothing_else() -> None:
    """``InvalidCalibration`` was caught by nobody, and the runner only said "unexpected error"."""

    class Services:
        solver = pool_of(b'{"calibration": "[]", "change": 0}')
        _trusted = True

    Services.solver._trusted = True
    state = Training(PerseusJob(JobRef("ns", "job", "uid")))
    learner = Calibrator(state, cast(Any, Services))
    learner._record = cast(Any, type("Record", (), {"request": lambda self, inputs: ASKED})())
    await learner.calibrate(INPUTS, None)
    assert state.calibration.fault is not None
    assert not state.calibration.running


async def test_no_answer_is_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of JSON held the loop for 18 s."""
    import threading

    from perseus_operator.families.training.work import calibrator as module

    threads = list[int]()

    def parse(answer: bytes) -> Any:
        threads.append(threading.get_ident())
        raise SolveFailed("no")

    monkeypatch.setattr(module, "parse_calibration_result", parse)
    state = Training(PerseusJob(JobRef("ns", "job", "uid")))

    class Services:
        class solver:
            @staticmethod
            async def calibrate(request: CalibrateRequest, namespace: str) -> bytes:
                return b"{}"

    learner = Calibrator(state, cast(Any, Services))
    learner._record = cast(Any, type("Record", (), {"request": lambda self, inputs: ASKED})())
    await learner.calibrate(INPUTS, None)
    assert threads
    assert threads[0] != threading.get_ident()


# -------------------------------------------------------------------------------------------------- sizes of answers


@pytest.mark.parametrize(("stages", "microbatches", "points"), [(1, 1, 2), (2, 4, 12), (4, 8, 100)])
def test_honest_answers_are_within_their_bounds(stages: int, microbatches: int, points: int) -> None:
    inputs = replace(INPUTS, profile_csv=profile_csv(stages), stages=stages, microbatches=microbatches, points=points)
    assert len(solve_in_process(inputs)) < most_frontier_bytes(inputs) / 2


def test_a_calibration_is_within_its_bound_with_room(honest: bytes) -> None:
    assert len(honest) < most_calibration_bytes(INPUTS) / 4
    thousand = replace(INPUTS, stages=1_000, microbatches=1)
    assert 2 << 20 < most_calibration_bytes(thousand) <= 8 << 20, "a thousand stages take about one MiB"
    assert most_calibration_bytes(replace(thousand, microbatches=64)) <= 8 << 20


async def test_the_service_is_told_the_bound() -> None:
    service = Service(b"{}")
    pool = SolverPool(workers=1, timeout_s=60, memory_mib=8192, service=service)
    with pytest.raises(SolveFailed):
        await pool.calibrate(ASKED)
    with pytest.raises(SolveFailed):
        await pool.solve(INPUTS)
    assert service.allowed == [most_calibration_bytes(INPUTS), most_frontier_bytes(INPUTS)]


@asynccontextmanager
async def program(monkeypatch: pytest.MonkeyPatch, text: str) -> AsyncIterator[None]:
    """The worker process runs this instead."""
    real = asyncio.create_subprocess_exec

    async def instead(*_: str, **pipes: Any) -> Any:
        return await real(sys.executable, "-I", "-S", "-c", text, **pipes)

    monkeypatch.setattr(process.asyncio, "create_subprocess_exec", instead)
    yield
    monkeypatch.undo()


async def test_a_process_that_answers_too_much_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536); sys.stderr.write('y' * 65536)"
    async with program(monkeypatch, endless):
        verdict = await run_worker(Task.SOLVE, b"x" * 3_000_000, timeout_s=60, memory_mib=512, most_bytes=100_000)
    assert verdict.outcome is Outcome.DIED
    assert "more than 100000 bytes" in verdict.message


async def test_a_process_that_does_not_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with program(monkeypatch, "import sys; sys.stderr.write('y' * 100000 + '\\nno\\n'); sys.exit(2)"):
        verdict = await run_worker(Task.SOLVE, b"x" * 3_000_000, timeout_s=60, memory_mib=512, most_bytes=100)
    assert verdict == Verdict(Outcome.REFUSED, message="no")


@given(st.binary(max_size=100))
def test_whatever_a_worker_sends_is_a_verdict_or_one_error(data: bytes) -> None:
    with suppress(InvalidAnswer):
        assert isinstance(verdict_of(data).outcome, Outcome)


def test_what_a_worker_says_in_words_is_short() -> None:
    answer = solver_pb2.WorkResponse(outcome=99, message="x" * 10_000)  # type: ignore[arg-type]
    verdict = verdict_of(answer.SerializeToString())
    assert (verdict.outcome, len(verdict.message)) == (Outcome.DIED, process.LONGEST_MESSAGE)

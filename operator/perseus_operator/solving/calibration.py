"""Calibration of predicted iteration times from telemetry: the recorded iterations, the request to the worker, its
result.

``FrontierTimes`` knows the planned time of every instruction; ``RecentIterations`` keeps measured iterations beside it;
``CalibrateRequest`` takes them to the worker process. The solver fits the model, the planner decides when.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from perseus_core.units import s_from_us
from perseus_operator.errors import SolveFailed
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.solving.request import SolveRequest, problem_of, profile_of, schedule_of
from perseus_operator.solving.view import CalibrationQuality
from perseus_solver.calibration import Calibration, Recorder, Trace, calibrate, predict_s
from perseus_solver.calibration.estimate import replay_s, verified
from perseus_solver.calibration.recorder import MOST_ITERATIONS
from perseus_solver.errors import InvalidCalibration, InvalidTrace, SolverError
from perseus_solver.kinds import Floats
from perseus_solver.model.profile import Profile
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import Schedule
from perseus_solver.stragglers import stage_pace, straggling_time_s

_MAX_NUMBERS: Final = 4_000_000
"""Durations recorded of one job, 32 MB: for very large pipelines fewer iterations, or too few to calibrate."""
MIN_CHANGE: Final = 0.005
"""Predictions that differ by less are not worth new plans."""
_MAX_CACHED_PLANS: Final = 32
"""Plans whose instruction times are cached."""
_QUOTED: Final = 80
"""Characters of a parser's complaint."""


class FrontierTimes:
    """Planned times of single instructions under the plans of a frontier; a ``detector.PlannedTimes``."""

    def __init__(self, simulator: Simulator, frontier: Frontier) -> None:
        self.simulator = simulator
        self._frontier = frontier
        self._rows: dict[int | None, Floats] = {}
        self._fastest = simulator.choice_of(frontier.frequencies_mhz[0])
        self._t_min_s = float(simulator.run(self._fastest).iteration_time_s)

    @property
    def schedule(self) -> Schedule:
        """What every pipeline runs."""
        return self.simulator.problem.schedule

    def durations_s(self, point: int | None) -> Floats:
        """Of every instruction under a point of the frontier; None: at default clocks, the highest."""
        row = self._rows.get(point)
        if row is None:
            if point is None:
                choice = np.zeros_like(self._fastest)
            else:
                last = self._frontier.frequencies_mhz.shape[0] - 1
                choice = self.simulator.choice_of(self._frontier.frequencies_mhz[min(point, last)])
            if len(self._rows) >= _MAX_CACHED_PLANS:
                self._rows.clear()
            row = self._rows[point] = self.simulator.duration_s(choice)
        return row

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        """See ``detector.PlannedTimes``."""
        wanted = np.diff(self.schedule.stage_offset).tolist()
        whole = {
            dp: stages_us
            for dp, stages_us in iteration.stages_us.items()
            if [len(stage) for stage in stages_us] == wanted
        }
        if not whole:
            return {}
        measured_s = np.stack([np.concatenate(stages_us) for stages_us in whole.values()]) / 1e6
        planned_s = np.stack([self.durations_s(iteration.points[dp]) for dp in whole])
        return dict(zip(whole, stage_pace(measured_s, planned_s, self.schedule.stage_offset).tolist(), strict=True))

    def slowdown(self, stage_slowdowns: Mapping[int, float]) -> float:
        """See ``detector.PlannedTimes``."""
        return straggling_time_s(self.simulator, self._fastest, stage_slowdowns) / self._t_min_s


class RecentIterations:
    """The latest iterations of one job, each with the planned time of every instruction."""

    def __init__(self, schedule: Schedule) -> None:
        most = min(MOST_ITERATIONS, _MAX_NUMBERS // max(1, schedule.instructions))
        self._recorder = Recorder(schedule, most)
        self._planned: deque[Floats] = deque(maxlen=most)

    @property
    def schedule(self) -> Schedule:
        """What every iteration ran."""
        return self._recorder.schedule

    def __len__(self) -> int:
        return len(self._recorder)

    def add(self, iteration: JobIteration, planned_times: FrontierTimes) -> bool:
        """Record an iteration; False: its instructions were not measured, or do not match the schedule."""
        pipeline = iteration.slowest
        point = iteration.points[pipeline]
        try:
            self._recorder.add(
                plan=-1 if point is None else point,
                iteration_time_s=s_from_us(iteration.time_us),
                stages=[np.asarray(durations_us) / 1e6 for durations_us in iteration.stages_us.get(pipeline, ())],
            )
        except InvalidTrace:
            return False
        self._planned.append(planned_times.durations_s(point))
        return True

    def request(self, inputs: SolveRequest) -> CalibrateRequest:
        """Everything recorded so far, for a job with these inputs."""
        trace = self._recorder.trace()
        return CalibrateRequest(inputs, trace.plan, trace.duration_s, trace.iteration_time_s, np.stack(self._planned))


@dataclass(frozen=True, eq=False)
class CalibrateRequest:
    """What a calibration is made from. ``inputs.calibration`` is the one in use."""

    inputs: SolveRequest
    plan: npt.NDArray[np.int32]
    duration_s: Floats
    iteration_time_s: Floats
    planned_s: Floats

    def to_bytes(self) -> bytes:
        """One line of JSON, then the arrays."""
        arrays = io.BytesIO()
        np.savez(
            arrays,
            plan=self.plan,
            duration_s=self.duration_s,
            iteration_time_s=self.iteration_time_s,
            planned_s=self.planned_s,
        )
        return json.dumps(asdict(self.inputs)).encode() + b"\n" + arrays.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrateRequest:
        """What ``to_bytes`` made."""
        line, _, arrays = data.partition(b"\n")
        stored = np.load(io.BytesIO(arrays), allow_pickle=False)
        return cls(SolveRequest(**json.loads(line)), **{name: stored[name] for name in stored.files})


def calibrate_in_process(request: CalibrateRequest) -> bytes:
    """Calibrate, in the worker process; the result also says by how much predictions change.

    Raises:
        SolverError: the iterations say too little.
    """
    trace = _trace_of(request)
    return _answer(request, trace, calibrate(trace, planned_s=request.planned_s))


@dataclass(frozen=True, eq=False)
class CheckRequest:
    """A calibration that a worker of the solver service claims, and what it was asked."""

    asked: bytes
    """A `CalibrateRequest`."""
    answer: bytes

    def to_bytes(self) -> bytes:
        """The length of the answer in one line, the answer, then what was asked."""
        return b"%d\n" % len(self.answer) + self.answer + self.asked

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckRequest:
        """What ``to_bytes`` made."""
        line, _, rest = data.partition(b"\n")
        size = int(line)
        return cls(rest[size:], rest[:size])


def check_in_process(request: CheckRequest) -> bytes:
    """Judge a claimed calibration by the iterations that it is to explain, in the worker process.

    Nothing of the claim is left but its delays, if they explain the iterations; see `verified`.

    Raises:
        SolverError: it is no calibration of this pipeline.
    """
    asked = CalibrateRequest.from_bytes(request.asked)
    claimed, _ = _answered(request.answer)
    trace = _trace_of(asked)
    return _answer(asked, trace, verified(Calibration.from_json(claimed), trace, planned_s=asked.planned_s))


def _trace_of(request: CalibrateRequest) -> Trace:
    return Trace(
        schedule_of(request.inputs, profile_of(request.inputs)),
        request.plan,
        request.duration_s,
        request.iteration_time_s,
    )


def _answer(request: CalibrateRequest, trace: Trace, calibration: Calibration) -> bytes:
    change = None
    if calibration.explains:
        before = request.inputs.calibration
        before_s = predict_s(Calibration.from_json(before), trace) if before else replay_s(trace)
        change = float(np.median(np.abs(predict_s(calibration, trace) / before_s - 1)))
    return json.dumps({"calibration": calibration.to_json(), "change": change}).encode()


def _answered(answer: bytes) -> tuple[str, float | None]:
    """The calibration and the change of an answer, neither of them checked.

    Raises:
        InvalidCalibration: it is no answer.
    """
    try:
        document = json.loads(answer)
        text, change = document["calibration"], document["change"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidCalibration(f"the answer is no calibration: {str(error)[:_QUOTED]}") from None
    if not isinstance(text, str) or not (change is None or type(change) in (int, float)):
        raise InvalidCalibration("the answer is no calibration: it must have a text and a number")
    return text, change


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration as JSON, and its quality."""

    text: str
    quality: CalibrationQuality
    change: float | None = None
    """Median share by which predictions change; None: the calibration predicts nothing, or it is not known."""

    def is_worth_using(self, in_use: str) -> bool:
        """Whether to plan with it from now on. The first one is always used: bounds need its allowance."""
        return self.quality.explains and (not in_use or (self.change is not None and self.change > MIN_CHANGE))


def parse_calibration_result(data: bytes) -> CalibrationResult:
    """Parse the worker's answer. It takes milliseconds for each hundred stages: not for the event loop.

    Raises:
        SolveFailed: it is no calibration; one line that says why.
    """
    try:
        text, change = _answered(data)
        return open_calibration(text, change=change)
    except SolverError as error:
        raise SolveFailed(str(error)) from error


def open_calibration(text: str, *, change: float | None = None) -> CalibrationResult:
    """A calibration from its JSON.

    Raises:
        InvalidCalibration: naming the field and the rule.
    """
    calibration = Calibration.from_json(text)
    quality = CalibrationQuality(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        explains=calibration.explains,
        reason=calibration.reason,
        heldout_error=_share(calibration.quality.heldout_mape_percent),
        uncalibrated_error=_share(calibration.quality.replay_mape_percent) or 0.0,
        iterations=calibration.quality.iterations_fitted + calibration.quality.iterations_heldout,
        allowance=calibration.allowance,
    )
    return CalibrationResult(text, quality, change)


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def check_calibration(text: str, inputs: SolveRequest, profile: Profile) -> CalibrationResult:
    """Parse a stored calibration and check that it can be used for these inputs.

    Args:
        text: JSON.
        inputs: of the job's frontier.
        profile: of these inputs, parsed.

    Raises:
        SolveFailed: it cannot; one line that says why.
    """
    try:
        result = open_calibration(text)
        Calibration.from_json(text).delays_for(schedule_of(inputs, profile))
    except SolverError as error:
        raise SolveFailed(str(error)) from error
    return result


def calibration_key(inputs: SolveRequest) -> str:
    """Key of a calibration among those of its profile: it is valid for one schedule only."""
    if inputs.schedule_csv:
        return f"calibration-custom-{hashlib.sha256(inputs.schedule_csv.encode()).hexdigest()[:16]}.json"
    chunks = "" if inputs.chunks is None else f"x{inputs.chunks}"
    return f"calibration-{inputs.schedule.lower()}-{inputs.stages}x{inputs.microbatches}{chunks}.json"


def simulator_of(inputs: SolveRequest, profile: Profile | None = None) -> Simulator:
    """Of the problem with these inputs; their profile, if it is parsed already."""
    return Simulator(problem_of(inputs, profile))

"""One PerseusJob as the API server returns it: spec, status, frontier, and the profile behind it if it can be read.

A job without a frontier is an error whose message is the reason, taken from the job's own conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perseus_core import keys
from perseus_core.units import mw_from_w, us_from_s
from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import CannotAnswer, InvalidSpec, KubeError, KubeForbidden, KubeNotFound
from perseus_operator.families.training.shape import completed, shape_from_status
from perseus_operator.plugin.named import Reader, read_named
from perseus_operator.solving.calibration import calibration_key, simulator_of
from perseus_operator.solving.frontier import stored_frontier
from perseus_operator.solving.request import SolveRequest
from perseus_solver.errors import SolverError
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator

_BEFORE_FRONTIER = (ConditionType.ACCEPTED, ConditionType.PROFILE_READY, ConditionType.FRONTIER_READY)


@dataclass(frozen=True)
class PlannedJob:
    """A job that has a frontier."""

    namespace: str
    name: str
    spec: JobSpec
    status: Mapping[str, Any]
    frontier: Frontier
    simulator: Simulator | str
    """Of the profile that the frontier was solved from; a string: why there is none."""

    @property
    def point(self) -> int | None:
        """The point in force on pipelines that are no stragglers; None: no plan is in force."""
        plan = self.status.get("plan")
        return None if plan is None else int(plan["point"])

    def condition(self, kind: ConditionType) -> Mapping[str, Any]:
        """Return the condition of a type; empty: the operator has not reported it yet."""
        return _condition(self.status, kind)


def load_job(reader: Reader, namespace: str, name: str) -> PlannedJob:
    """Read a job and its frontier.

    Args:
        reader: of the API server.
        namespace: of the PerseusJob.
        name: of the PerseusJob, as ``read_named`` takes it.

    Returns:
        The job, with a simulator of its pipeline if the profile that was solved can still be read.

    Raises:
        CannotAnswer: there is no such job, access is denied, or the job has no frontier yet: one line that says why.
        KubeError: the API server did not answer.
    """
    _, job = read_named(reader, namespace, name, (keys.KIND,))
    name = job["metadata"]["name"]
    status = job.get("status") or {}
    try:
        spec = completed(parse_spec(JobSpec, job.get("spec")), name, shape_from_status(status.get("shape")))
    except InvalidSpec as error:
        raise CannotAnswer(f"{namespace}/{name}: {error}") from error
    if not spec.is_planned:
        raise CannotAnswer(f"{namespace}/{name} has one clock for all GPUs, objective FixedClock: there is no plan")
    if "frontier" not in status:
        raise CannotAnswer(f"{namespace}/{name} has no frontier yet: {missing_frontier_reason(status)}")
    frontier = _frontier(reader, namespace, name, status["frontier"])
    return PlannedJob(namespace, name, spec, status, frontier, _simulator(reader, namespace, spec, frontier))


def missing_frontier_reason(status: Mapping[str, Any]) -> str:
    """Return why a job has no frontier, from the conditions of its status."""
    if not status.get("conditions"):
        return "no operator has reported on it yet; check that one runs and serves this namespace"
    for kind in _BEFORE_FRONTIER:
        condition = _condition(status, kind)
        if condition and condition.get("status") != "True":
            return f"{condition['reason']}: {condition['message']}"
    return "its conditions give no reason; see kubectl describe perseusjob"


def _condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    return next((condition for condition in status.get("conditions", ()) if condition.get("type") == kind), {})


def _frontier(reader: Reader, namespace: str, name: str, figures: Mapping[str, Any]) -> Frontier:
    try:
        body = reader.stored(keys.FRONTIER_PLURAL, namespace, name)
    except KubeNotFound as error:
        raise CannotAnswer(
            f"PerseusFrontier {name} does not exist in namespace {namespace}: it was deleted, or is too large to store"
        ) from error
    except KubeForbidden as error:
        raise CannotAnswer(f"access denied to PerseusFrontier {name}: {error}") from error
    stored = stored_frontier(body, figures["digest"])
    if stored is None:
        raise CannotAnswer(f"PerseusFrontier {name} is not the status's: it is being replaced, try again")
    try:
        return Frontier.from_bytes(stored[0])
    except SolverError as error:
        message = f"PerseusFrontier {name}: {error}; this program and the operator may differ in version"
        raise CannotAnswer(message) from error


def _simulator(reader: Reader, namespace: str, spec: JobSpec, frontier: Frontier) -> Simulator | str:
    """Simulate the profile, with or without the calibration stored beside it, as the frontier was solved.

    Returns:
        The simulator; a string: why there is none.
    """
    if not spec.pipeline.is_named:
        return "the job has a custom schedule, and schedules are not stored with the frontier"
    try:
        name, csv = _profile(reader, namespace, spec)
    except (KubeError, KeyError) as error:
        return f"the profile cannot be read from {spec.profile.where}: {error}"
    plain = SolveRequest(
        profile_csv=csv,
        schedule=spec.pipeline.solver_name,
        stages=spec.pipeline.stages,
        microbatches=spec.pipeline.solved_microbatches,
        chunks=spec.pipeline.chunks,
        blocking_power_mw=mw_from_w(frontier.blocking_power_w),
        points=spec.points,
    )
    # What was rehearsed takes longer than the simulator says.
    ideal_s = frontier.t_min_s if frontier.rehearsed is None else float(frontier.rehearsed.ideal_time_s[0])
    for calibration in ("", _calibration(reader, namespace, name, plain)):
        try:
            simulator = simulator_of(SolveRequest(**{**vars(plain), "calibration": calibration}))
            run = simulator.run(simulator.choice_of(frontier.frequencies_mhz[0]))
        except SolverError:
            continue
        if us_from_s(float(run.iteration_time_s)) == us_from_s(ideal_s):
            return simulator
    return f"the profile in {spec.profile.where} is not the one that the frontier was solved from"


def _calibration(reader: Reader, namespace: str, profile: str, request: SolveRequest) -> str:
    try:
        status = reader.stored(keys.PROFILE_PLURAL, namespace, profile).status
        return str((status.get("calibrations") or {}).get(calibration_key(request), ""))
    except (KubeForbidden, KubeNotFound):
        return ""


def _profile(reader: Reader, namespace: str, spec: JobSpec) -> tuple[str, str]:
    """Return the name of the object that stores the profile, and its CSV.

    Raises:
        KubeError: it cannot be read.
        KeyError: it holds no profile.
    """
    reference = spec.profile.config_map_ref
    if reference is None:
        assert spec.profile.profile_ref is not None
        name = spec.profile.profile_ref.name
        return name, reader.stored(keys.PROFILE_PLURAL, namespace, name).spec["csv"]
    config_map, key = reader.config_map(namespace, reference.name), reference.key
    csv = config_map.data[key] if key in config_map.data else config_map.binary[key].decode(errors="replace")
    return reference.name, csv

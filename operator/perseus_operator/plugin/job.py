"""One job as the cluster shows it: spec, status, frontier, and the profile behind it where it can still be read.

``gather`` is called by ``cli``; what to say of it is ``reports``'. What is missing is an error that says why, from the
job's own conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.job import JobSpec, parse_spec
from perseus_operator.errors import CannotAnswer, InvalidSpec, KubeError, KubeForbidden, KubeNotFound
from perseus_operator.objects import ConfigMap, Json
from perseus_operator.solving.calibration import calibration_key, calibration_map_name, simulator_of
from perseus_operator.solving.frontier import BYTES_KEY, DIGEST_KEY
from perseus_operator.solving.request import SolveRequest
from perseus_proto.units import mw_from_w, us_from_s
from perseus_solver.errors import SolverError
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator

_BEFORE_FRONTIER = (ConditionType.ACCEPTED, ConditionType.PROFILE_READY, ConditionType.FRONTIER_READY)


class Reader(Protocol):
    """What is asked of the cluster."""

    def job(self, namespace: str, name: str) -> Json:
        """Raises KubeNotFound."""
        ...

    def config_map(self, namespace: str, name: str) -> ConfigMap:
        """Raises KubeNotFound."""
        ...


@dataclass(frozen=True)
class Facts:
    """A job that has a frontier."""

    namespace: str
    name: str
    spec: JobSpec
    status: Mapping[str, Any]
    frontier: Frontier
    simulator: Simulator | str
    """Of the profile that the frontier was solved from; else why there is none."""

    @property
    def point(self) -> int | None:
        """The plan in force on pipelines that are no stragglers."""
        plan = self.status.get("plan")
        return None if plan is None else int(plan["point"])

    def condition(self, kind: ConditionType) -> Mapping[str, Any]:
        """What is said of one aspect; empty: nothing yet."""
        return _condition(self.status, kind)


def gather(reader: Reader, namespace: str, name: str) -> Facts:
    """Everything about a job.

    Raises:
        CannotAnswer: no such job, or it has no frontier yet: one line that says why.
        KubeError: the cluster did not answer.
    """
    job = job_of(reader, namespace, name)
    status = job.get("status") or {}
    try:
        spec = parse_spec(job.get("spec"))
    except InvalidSpec as error:
        raise CannotAnswer(f"{namespace}/{name}: {error}") from error
    if "frontier" not in status:
        raise CannotAnswer(f"{namespace}/{name} has no frontier yet: {why_none(status)}")
    frontier = _frontier(reader, namespace, status["frontier"])
    return Facts(namespace, name, spec, status, frontier, _simulator(reader, namespace, spec, frontier))


def job_of(reader: Reader, namespace: str, name: str) -> Json:
    """The PerseusJob.

    Raises:
        CannotAnswer: there is none, or it may not be read.
    """
    try:
        return reader.job(namespace, name)
    except KubeNotFound as error:
        if "could not find the requested resource" in str(error):
            raise CannotAnswer("this cluster knows no PerseusJob: is the chart installed?") from error
        raise CannotAnswer(f"there is no PerseusJob {name} in namespace {namespace}") from error
    except KubeForbidden as error:
        raise CannotAnswer(f"you may not: {error}") from error


def why_none(status: Mapping[str, Any]) -> str:
    """Why a job has no frontier, from its conditions."""
    if not status.get("conditions"):
        return "no operator has looked at it yet; does one run and serve this namespace?"
    for kind in _BEFORE_FRONTIER:
        said = _condition(status, kind)
        if said and said.get("status") != "True":
            return f"{said['reason']}: {said['message']}"
    return "the operator has not said why; see kubectl describe perseusjob"


def _condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    return next((said for said in status.get("conditions", ()) if said.get("type") == kind), {})


def _frontier(reader: Reader, namespace: str, figures: Mapping[str, Any]) -> Frontier:
    name = figures["configMapName"]
    try:
        kept = reader.config_map(namespace, name)
    except KubeNotFound as error:
        raise CannotAnswer(
            f"ConfigMap {name}, which keeps the frontier, does not exist in namespace {namespace}: it may be too large"
            " to keep, or somebody has deleted it"
        ) from error
    except KubeForbidden as error:
        raise CannotAnswer(f"you may not read ConfigMap {name}, which keeps the frontier: {error}") from error
    if kept.data.get(DIGEST_KEY) != figures["digest"] or BYTES_KEY not in kept.binary:
        raise CannotAnswer(f"ConfigMap {name} holds another frontier than the status: it is being replaced, try again")
    try:
        return Frontier.from_bytes(kept.binary[BYTES_KEY])
    except SolverError as error:
        raise CannotAnswer(f"ConfigMap {name}: {error}; this program and the operator may differ in version") from error


def _simulator(reader: Reader, namespace: str, spec: JobSpec, frontier: Frontier) -> Simulator | str:
    """Of the profile, with or without the calibration kept beside it: whichever the frontier was solved with."""
    if not spec.pipeline.is_named:
        return "the order of instructions is the training processes' own, and not kept with the frontier"
    name, key = spec.profile.config_map_ref.name, spec.profile.config_map_ref.key
    try:
        kept = reader.config_map(namespace, name)
        csv = kept.data[key] if key in kept.data else kept.binary[key].decode(errors="replace")
    except (KubeError, KeyError) as error:
        return f"the profile cannot be read from ConfigMap {name}, key {key}: {error}"
    plain = SolveRequest(
        profile_csv=csv,
        schedule=spec.pipeline.solver_name,
        stages=spec.pipeline.stages,
        microbatches=spec.pipeline.microbatches or 0,
        chunks=spec.pipeline.chunks,
        blocking_power_mw=mw_from_w(frontier.blocking_power_w),
        points=spec.points,
    )
    for calibration in ("", _calibration(reader, namespace, name, plain)):
        try:
            simulator = simulator_of(SolveRequest(**{**vars(plain), "calibration": calibration}))
            run = simulator.run(simulator.choice_of(frontier.frequencies_mhz[0]))
        except SolverError:
            continue
        if us_from_s(float(run.iteration_time_s)) == us_from_s(frontier.t_min_s):
            return simulator
    return f"the profile in ConfigMap {name} is another one than the frontier was solved from"


def _calibration(reader: Reader, namespace: str, profile: str, request: SolveRequest) -> str:
    try:
        return reader.config_map(namespace, calibration_map_name(profile)).data.get(calibration_key(request), "")
    except KubeError:
        return ""

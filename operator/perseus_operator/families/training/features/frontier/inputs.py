"""The inputs of a frontier: which to read, and whether they need a solve or a calibration.

Profile, schedule, calibration and hardware are inputs alike: with other ones the frontier is solved again, while the
plans in force stay.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial

from perseus_core.evidence import Evidence
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import ScheduleName
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.frontier.calibration_progress import CalibrationProgress
from perseus_operator.families.training.features.frontier.input_progress import InputProgress
from perseus_operator.families.training.features.frontier.solve_progress import SolveProgress
from perseus_operator.families.training.features.hardware.hardware import JobHardware, hardware_of, next_hardware
from perseus_operator.families.training.features.hardware.progress import HardwareProgress
from perseus_operator.jobs.limits import Limits
from perseus_operator.nodes.job_nodes import JobNodes


@dataclass(frozen=True)
class ReadInputs:
    """Read the profile, and the schedule if the spec names a ConfigMap for it."""


@dataclass(frozen=True)
class Solve:
    """Get the frontier of these inputs: restore it from its PerseusFrontier, or solve."""

    digest: str
    basis: str = field(default="", compare=False)
    """Digest of the inputs without calibration and hardware, which are measured."""


@dataclass(frozen=True)
class Calibrate:
    """Estimate from the iterations recorded so far how long iterations really take."""


InputAction = ReadInputs | Solve | Calibrate


def hardware_for(progress: HardwareProgress, spec: JobSpec, nodes: JobNodes, evidence: Evidence) -> JobHardware | None:
    """What plans are to be rehearsed under; None: the GPUs are not known yet."""
    shape = spec.pipeline
    reported = hardware_of(
        nodes.values(),
        ranks=shape.data_parallel * shape.stages * shape.tensor_parallel,
        stored=progress.stored,
        marks=evidence.marks,
        noise=progress.noise,
        described=progress.described,
    )
    hardware = next_hardware(progress.in_use, reported)
    return hardware and replace(hardware, pipelines=shape.data_parallel)


def inputs_digest(
    spec: JobSpec,
    profile_digest: str,
    calibration_digest: str = "",
    *,
    measured_power_mw: int | None = None,
    schedule_csv: str = "",
    hardware: str = "",
) -> str:
    """SHA-256 over everything that the frontier depends on; the leading word changes with the solver's format."""
    given = spec.profile.blocking_power_milliwatts
    parts = (
        "perseus.frontier.1",
        profile_digest,
        spec.pipeline.schedule.value if spec.pipeline.schedule else "",
        spec.pipeline.stages,
        spec.pipeline.microbatches,
        spec.pipeline.chunks,
        measured_power_mw if given is None else given,
        spec.points,
        calibration_digest,
        *([schedule_csv] if schedule_csv else ()),
        *([hardware] if hardware else ()),
        # Earlier operators planned parts of one action as if each sent its own result: such a frontier is solved anew.
        *(["actions"] if spec.pipeline.schedule is ScheduleName.DUALPIPE or "OVERLAP_F_B" in schedule_csv else ()),
        *([f"switching {spec.switching.max_energy_loss_ratio}"] if spec.switching else ()),
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


@dataclass(frozen=True)
class FrontierParts:
    """How far the inputs of a frontier are, and the frontier itself."""

    inputs: InputProgress
    solve: SolveProgress
    calibration: CalibrationProgress


def input_actions(
    parts: FrontierParts, spec: JobSpec, hardware: JobHardware | None, basis: PlanBasis, *, now_s: float, limits: Limits
) -> list[InputAction]:
    """What to read, solve or calibrate now.

    Args:
        parts: of the job.
        spec: of the job.
        hardware: to rehearse plans under, see `hardware_for`.
        basis: what plans rest on.
        now_s: monotonic.
        limits: the operator's settings that matter here.
    """
    actions: list[InputAction] = []
    inputs = parts.inputs
    if not inputs.reading and _read_due_s(inputs, limits) <= now_s:
        actions.append(ReadInputs())
    if inputs.profile_digest is not None and inputs.schedule_known(spec):
        digest_with = partial(
            inputs_digest,
            spec,
            inputs.profile_digest,
            measured_power_mw=inputs.measured_power_mw,
            schedule_csv=inputs.schedule_csv or "",
        )
        measured = parts.calibration.digest_in_use
        digest = digest_with(calibration_digest=measured, hardware=hardware.to_json() if hardware else "")
        if _solve_due(parts.solve, digest, now_s):
            actions.append(Solve(digest, digest_with()))
        elif basis is PlanBasis.PROFILE and _calibrate_due(parts, limits):
            actions.append(Calibrate())
    return actions


def inputs_wake_s(inputs: InputProgress, solve: SolveProgress, *, now_s: float, limits: Limits) -> float:
    """When to look again at the latest (monotonic)."""
    due_s = _read_due_s(inputs, limits)
    refresh_s = now_s + limits.profile_refresh_s
    if now_s < solve.again_at_s:
        refresh_s = min(refresh_s, solve.again_at_s)
    return min(due_s, refresh_s) if not inputs.reading and due_s > now_s else refresh_s


def _read_due_s(inputs: InputProgress, limits: Limits) -> float:
    if inputs.read_at_s is None:
        return 0.0
    failed = inputs.profile_fault or inputs.schedule_fault
    return inputs.read_at_s + (limits.profile_retry_s if failed else limits.profile_refresh_s)


def _solve_due(solve: SolveProgress, digest: str, now_s: float) -> bool:
    have = any(view is not None and view.digest == digest for view in (solve.frontier, solve.coming))
    failed = solve.fault is not None and solve.fault[0] == digest and now_s < solve.again_at_s
    return not have and not failed and solve.solving is None


def _calibrate_due(parts: FrontierParts, limits: Limits) -> bool:
    progress, solve = parts.calibration, parts.solve
    if progress.running or solve.solving is not None or solve.coming is not None or solve.frontier is None:
        return False
    enough = progress.recorded >= limits.calibrate_after
    wait = limits.calibrate_after if progress.fault is not None else limits.calibrate_again
    return enough and (not progress.started or progress.recorded_since_start >= wait)

"""What a frontier is solved from, and the solver's values that follow from it.

The solver is imported inside functions: the operator's own process starts without it, and the kubectl plugin too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from perseus_core.units import w_from_mw
from perseus_operator.errors import InvalidProfile
from perseus_solver.significance import NO_SLOWDOWN

if TYPE_CHECKING:
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.profile import Profile
    from perseus_solver.schedules import Schedule


_MAX_MESSAGE: Final = 200
_UNCALIBRATED: Final = NO_SLOWDOWN / 2
"""What counts as no slower before iteration times are calibrated. Messages between computations are not in the profile,
so iterations exceed what is planned; the other half is left for them, or the bound guard would see both together."""


@dataclass(frozen=True)
class SolveRequest:
    """Everything that a frontier is solved from."""

    profile_csv: str
    schedule: str
    stages: int
    microbatches: int
    """Of a named schedule; a custom schedule contains it."""
    chunks: int | None
    blocking_power_mw: int
    points: int
    calibration: str = ""
    """JSON of the calibration to plan with; empty: none."""
    schedule_csv: str = ""
    """A custom schedule; empty: ``schedule`` names one."""
    switch_loss: float | None = None
    """Share of the energy that may be given up for fewer changes of clock; None: least energy."""
    hardware: str = ""
    """JSON of the hardware to rehearse plans under, as ``perseus plan --hardware`` reads it; empty: clocks change at
    once."""

    @property
    def no_slowdown(self) -> float:
        """Share by which a plan may exceed the fastest and count as no slower: exact plans by nothing."""
        if not self.hardware:
            return 0.0
        return NO_SLOWDOWN if self.calibration else _UNCALIBRATED


def parse_profile(csv: bytes, stages: int) -> Profile:
    """Parse a CSV and check that it is a usable profile. Quick compared with a solve, but too slow for the event loop:
    what comes of it is passed on, and no other part of the operator's process reads the text again.

    Raises:
        InvalidProfile: one line with the line of the file, the column and the rule.
    """
    from perseus_solver.errors import SolverError, content_withheld
    from perseus_solver.model.profile import read_profile

    try:
        with content_withheld():  # conditions may be read by those who may not read the ConfigMap
            return read_profile(csv, stages=stages)
    except SolverError as error:
        message = str(error)
        short = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        raise InvalidProfile("ProfileInvalid", short) from error


def schedule_of(request: SolveRequest, profile: Profile | None) -> Schedule:
    """The schedule of a request, with the constant-time instructions of its profile.

    Args:
        request: what to solve.
        profile: of the request, parsed; None: it is not known yet, and there are no constant-time instructions.
    """
    from perseus_solver.schedules import build_schedule, read_schedule, with_constants

    constants = profile.constant_stages if profile else ()
    if request.schedule_csv:
        return with_constants(read_schedule(request.schedule_csv), constants)
    return build_schedule(
        request.schedule,
        stages=request.stages,
        microbatches=request.microbatches,
        chunks=request.chunks,
        constants=constants,
    )


def profile_of(request: SolveRequest) -> Profile:
    """The profile of a request that came from another process.

    Raises:
        perseus_solver.errors.InvalidProfile: it is not usable.
    """
    from perseus_solver.model.profile import read_profile

    return read_profile(request.profile_csv.encode(), stages=request.stages)


def problem_of(request: SolveRequest, profile: Profile | None = None) -> Problem:
    """The solver's problem of a request.

    Args:
        request: what to solve.
        profile: of the request, parsed; None: it is parsed here.
    """
    from perseus_solver.model.problem import build_problem

    profile = profile or profile_of(request)
    schedule = schedule_of(request, profile)
    calibration = None
    if request.calibration:
        from perseus_solver.calibration import Calibration

        calibration = Calibration.from_json(request.calibration)
    return build_problem(
        profile, schedule, blocking_power_w=w_from_mw(request.blocking_power_mw), calibration=calibration
    )

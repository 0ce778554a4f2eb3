"""What the solver refuses, one line a class.

SolverError (ValueError)
├── InvalidProfile     the measurements cannot be used: names the row or column and the rule
├── InvalidSchedule    unknown name, bad counts, or an order that deadlocks
├── InvalidTrace       measured iterations cannot be used: names the file, the line, the column and the rule
├── InvalidCalibration the calibration is damaged, does not explain the run, or belongs to another pipeline
├── InvalidProblem     profile and schedule do not fit each other, or a parameter is out of range
└── Infeasible         no plan is this fast; carries the fastest time, T_min
"""

from __future__ import annotations


class SolverError(ValueError):
    """Bad input to the solver; the message names the field and the rule."""


class InvalidProfile(SolverError):
    """The profile cannot be used."""


class InvalidSchedule(SolverError):
    """The schedule cannot be built or cannot be executed."""


class InvalidTrace(SolverError):
    """The measured iterations cannot be used."""


class InvalidCalibration(SolverError):
    """The calibration cannot be used for this problem."""


class InvalidProblem(SolverError):
    """Profile, schedule and parameters do not fit each other."""


class Infeasible(SolverError):
    """No plan meets the deadline."""

    def __init__(self, deadline_s: float, t_min_s: float) -> None:
        super().__init__(
            f"deadline {deadline_s:.6g} s is shorter than the fastest possible iteration, T_min = {t_min_s:.6g} s"
        )
        self.deadline_s = deadline_s
        self.t_min_s = t_min_s

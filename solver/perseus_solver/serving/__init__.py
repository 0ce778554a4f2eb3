"""Serving: what an engine's steps take at each clock, fitted to what was seen, and the least clock for each load.

Windows, each about a second of one engine at one clock, come in (`Window`). `fit` finds the models of time and energy
that explain them, with intervals, or says that none does. `clock_table` makes the table that the agent's law reads,
with a certificate that `check` confirms, and `prompt_table` that of engines which compute prompts alone; `ceilings`
says what a replica carries while its clock may not go above one. `Exploration` says which clock a canary tries next, so
that there are windows at several clocks; `Fingerprint` says for which other replicas they count, and `compare` whether
they do.

Package `planner` says which replicas serve tomorrow, from these models and a forecast. All of it is pure, and nothing
is shared with the planning of training.
"""

from perseus_solver.serving.ceilings import Ceiling, Mix, ceilings
from perseus_solver.serving.check import check
from perseus_solver.serving.exploration import SHARE, Attempt, Exploration, Sight, Why, windows_needed
from perseus_solver.serving.fingerprint import Fingerprint, step_flags
from perseus_solver.serving.fit import LEAST_WINDOWS, Agreement, FitResult, Seen, Verdict, compare, fit
from perseus_solver.serving.model import StepModel, StepModels, WattModel
from perseus_solver.serving.table import (
    MARGIN,
    Bound,
    Certificate,
    TableRequest,
    TableResult,
    clock_table,
    prompt_table,
)
from perseus_solver.serving.window_csv import windows_from_csv, windows_to_csv
from perseus_solver.serving.windows import Window

__all__ = [
    "LEAST_WINDOWS",
    "MARGIN",
    "SHARE",
    "Agreement",
    "Attempt",
    "Bound",
    "Ceiling",
    "Certificate",
    "Exploration",
    "Fingerprint",
    "FitResult",
    "Mix",
    "Seen",
    "Sight",
    "StepModel",
    "StepModels",
    "TableRequest",
    "TableResult",
    "Verdict",
    "WattModel",
    "Why",
    "Window",
    "ceilings",
    "check",
    "clock_table",
    "compare",
    "fit",
    "prompt_table",
    "step_flags",
    "windows_from_csv",
    "windows_needed",
    "windows_to_csv",
]

"""The mathematics: measurements and a schedule in, the time-energy frontier of frequency plans out.

    from perseus_solver import build_problem, build_schedule, read_profile, solve_frontier

    profile = read_profile(Path("profile.csv"), stages=8)
    schedule = build_schedule("1f1b", stages=8, microbatches=96)
    frontier = solve_frontier(build_problem(profile, schedule, blocking_power_w=83.64))
    plan = frontier[frontier.lookup(straggler_time_s)]

Names are imported when first used, so that the command line starts fast. Pure: no I/O beyond the CLI, no cluster, no
clocks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_solver.frontier import solve_deadline, solve_frontier
    from perseus_solver.kinds import Kind
    from perseus_solver.model.problem import Problem, build_problem
    from perseus_solver.model.profile import Profile, read_profile
    from perseus_solver.model.result import Frontier, Point, Status
    from perseus_solver.model.sampling import Sampling
    from perseus_solver.model.simulator import Simulator
    from perseus_solver.schedules import SCHEDULES, Schedule, build_schedule, read_schedule
    from perseus_solver.switching import Switching, reduce_clock_changes, reduce_clock_changes_of_point

__all__ = [
    "SCHEDULES",
    "Frontier",
    "Kind",
    "Point",
    "Problem",
    "Profile",
    "Sampling",
    "Schedule",
    "Simulator",
    "Status",
    "Switching",
    "build_problem",
    "build_schedule",
    "read_profile",
    "read_schedule",
    "reduce_clock_changes",
    "reduce_clock_changes_of_point",
    "solve_deadline",
    "solve_frontier",
]

_HOME = {
    "frontier": ("solve_deadline", "solve_frontier"),
    "kinds": ("Kind",),
    "model.problem": ("Problem", "build_problem"),
    "model.profile": ("Profile", "read_profile"),
    "model.result": ("Frontier", "Point", "Status"),
    "model.sampling": ("Sampling",),
    "model.simulator": ("Simulator",),
    "schedules": ("SCHEDULES", "Schedule", "build_schedule", "read_schedule"),
    "switching": ("Switching", "reduce_clock_changes", "reduce_clock_changes_of_point"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'perseus_solver' has no attribute {name!r}")
    return getattr(import_module(f"perseus_solver.{_MODULE_OF[name]}"), name)

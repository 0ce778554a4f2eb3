r"""The planner: measurements and a schedule in, the time-energy frontier of clock plans out.

A pipeline of a training job runs the same instructions in every iteration. This package chooses a clock for each of
them so that the iteration takes the least energy for its time, and proves how far each plan can be from the optimum.
It is a pure library: apart from its command line it reads no files and talks to no cluster and no GPU.

    profile (CSV) ──► model.profile ──┐
    schedule      ──► schedules ──────┴─► model.problem ──► relaxation ──► search ──► frontier ──► rehearsal
                                                            a bound        plans      of plans     on real clocks

``relaxation`` proves how little energy each iteration time needs, ``search`` finds plans near that, ``frontier`` joins
the two, and ``certify`` checks the proof without their code. ``rehearsal`` executes plans under clocks that change
late. ``serving`` is apart: steps of engines in, a table of clocks out. Begin with ``frontier``, then ``model.problem``.

The example plans a pipeline of two stages. A profile has the columns stage, instruction, frequency (MHz), time (s) and
energy (J):

>>> import perseus_solver as perseus
>>> profile = perseus.read_profile(
...     "stage,instruction,frequency,time,energy\n"
...     "0,forward,1400,0.050,20\n0,forward,1000,0.060,16\n0,backward,1400,0.100,40\n0,backward,1000,0.120,32\n"
...     "1,forward,1400,0.040,16\n1,forward,1000,0.048,13\n1,backward,1400,0.080,32\n1,backward,1000,0.096,26\n"
... )
>>> schedule = perseus.build_schedule("1F1B", stages=2, microbatches=4)
>>> problem = perseus.build_problem(profile, schedule, blocking_power_w=80.0)
>>> frontier = perseus.solve_frontier(problem)
>>> plan = frontier.at(1.05 * frontier.t_min_s)  # at most 5 % slower than the fastest plan
>>> print(f"{plan.iteration_time_s:.2f} s, {plan.energy_j:.2f} J, {plan.status}")
0.72 s, 409.48 J, within_gap
>>> plan.frequencies_mhz[schedule.span(1)].tolist()  # a clock for every instruction of stage 1
[1000, 1000, 1000, 1000, 1000, 1000, 1400, 1400]

Names are imported when they are first used, so that the command line starts without numpy and OR-Tools.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_core.instruction import InstructionKind
    from perseus_solver.certify import InvalidCertificate
    from perseus_solver.cli.documents import InvalidPlan
    from perseus_solver.cli.files import Unwritable
    from perseus_solver.comparison.lowtime_peer import PeerFailed
    from perseus_solver.errors import (
        Infeasible,
        InvalidCalibration,
        InvalidProblem,
        InvalidProfile,
        InvalidSchedule,
        InvalidTrace,
        SolverError,
    )
    from perseus_solver.exact import prove
    from perseus_solver.frontier import Planner, solve_deadline, solve_frontier
    from perseus_solver.model.deployed import DeployedGap
    from perseus_solver.model.graph import Option
    from perseus_solver.model.problem import Problem, build_problem
    from perseus_solver.model.profile import Profile, read_profile
    from perseus_solver.model.result import Frontier, InvalidFrontier, Point, Status
    from perseus_solver.model.sampling import Sampling
    from perseus_solver.model.simulator import Simulator
    from perseus_solver.rehearsal.hardware import InvalidHardware
    from perseus_solver.rehearsal.robust import RobustPlan, plan_robustly
    from perseus_solver.rehearsal.scatter import Scatter
    from perseus_solver.schedules import SCHEDULES, Schedule, build_schedule, read_schedule
    from perseus_solver.switching import reduce_clock_changes, reduce_clock_changes_of_point

__all__ = [
    "SCHEDULES",
    "DeployedGap",
    "Frontier",
    "Infeasible",
    "InstructionKind",
    "InvalidCalibration",
    "InvalidCertificate",
    "InvalidFrontier",
    "InvalidHardware",
    "InvalidPlan",
    "InvalidProblem",
    "InvalidProfile",
    "InvalidSchedule",
    "InvalidTrace",
    "Option",
    "PeerFailed",
    "Planner",
    "Point",
    "Problem",
    "Profile",
    "RobustPlan",
    "Sampling",
    "Scatter",
    "Schedule",
    "Simulator",
    "SolverError",
    "Status",
    "Unwritable",
    "build_problem",
    "build_schedule",
    "plan_robustly",
    "prove",
    "read_profile",
    "read_schedule",
    "reduce_clock_changes",
    "reduce_clock_changes_of_point",
    "solve_deadline",
    "solve_frontier",
]

_NAMES_OF_MODULE = {
    "certify": ("InvalidCertificate",),
    "cli.documents": ("InvalidPlan",),
    "cli.files": ("Unwritable",),
    "comparison.lowtime_peer": ("PeerFailed",),
    "errors": (
        "Infeasible",
        "InvalidCalibration",
        "InvalidProblem",
        "InvalidProfile",
        "InvalidSchedule",
        "InvalidTrace",
        "SolverError",
    ),
    "exact": ("prove",),
    "frontier": ("Planner", "solve_deadline", "solve_frontier"),
    "kinds": ("InstructionKind",),
    "model.graph": ("Option",),
    "model.problem": ("Problem", "build_problem"),
    "model.profile": ("Profile", "read_profile"),
    "model.deployed": ("DeployedGap",),
    "model.result": ("Frontier", "InvalidFrontier", "Point", "Status"),
    "model.sampling": ("Sampling",),
    "model.simulator": ("Simulator",),
    "rehearsal.hardware": ("InvalidHardware",),
    "rehearsal.robust": ("RobustPlan", "plan_robustly"),
    "rehearsal.scatter": ("Scatter",),
    "schedules": ("SCHEDULES", "Schedule", "build_schedule", "read_schedule"),
    "switching": ("reduce_clock_changes", "reduce_clock_changes_of_point"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'perseus_solver' has no attribute {name!r}")
    return getattr(import_module(f"perseus_solver.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # a notebook completes names that are not imported yet

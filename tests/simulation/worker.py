"""A process that runs seeds, each in a child of its own: ``python -m tests.simulation.worker FOLDER < requests``.

Its machine is the simulated one from the first import on. It solves once what all seeds solve; a child begins from
there, so seeds share nothing else and nothing is left of one. Each line of its input is a request, each of its output
an outcome, as JSON.
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import json
import os
import signal
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.simulation import machine
from tests.simulation.mutant import Mutant
from tests.simulation.mutants import MUTANTS

ENDLESS_S: Final = 4.0
"""Of processor time in one step, of which a whole seed takes less."""
LOOK_S: Final = 0.5
"""Of processor time between two looks at the step. Looks are counted, not the time: while the machine stands still, it
is charged to whoever ran, and only one look comes of it."""


def mutate(mutant: Mutant) -> None:
    """Break the code of a module on purpose, when it is imported."""
    real = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> types.CodeType | None:
        if name != mutant.module:
            return real(self, name)
        path = self.get_filename(name)
        source = self.get_source(name)
        for was, becomes in mutant.changes:
            if source.count(was) != 1:
                raise SystemExit(f"mutant {mutant.name}: {path} has {was!r} {source.count(was)} times")
            source = source.replace(was, becomes)
        code: types.CodeType = self.source_to_code(source.encode(), path)
        return code

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _take_time(of: Any, method: str) -> None:
    """Have a look of a GPU's thread at its rank take the processor time that the rank makes it take."""
    real = getattr(of, method)

    def look(self: Any, *args: Any, **named: Any) -> Any:
        thread = machine.scheduler().thread
        if thread is not None:
            thread.busy_s += self.channel.__dict__.get("look_s", 0.0)
        return real(self, *args, **named)

    setattr(of, method, look)


def _parse_beside(of: Any, name: str) -> None:
    """Promise 10: what a worker of the solver service has answered is read in a thread, not on the event loop."""
    real = getattr(of, name)

    def parse(*args: Any, **named: Any) -> Any:
        own = machine.scheduler()
        if own.thread is None:
            own.fail(f"promise 10: {name} reads an answer of the solver on the event loop")
        return real(*args, **named)

    setattr(of, name, parse)


def _guard() -> None:
    """A step that does not come to an end is stopped, and said."""
    step = looks = 0

    def look(*_: Any) -> None:
        nonlocal step, looks
        own = machine.scheduler()
        step, looks = own.steps, looks + 1 if own.steps == step else 0
        if looks * LOOK_S > ENDLESS_S:
            looks = 0
            frame = sys._getframe(1)
            where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            thread = own.thread
            own.fail(f"promise 10: {thread.name if thread else 'an event loop'} computes without an end, at {where}")
            if thread is not None:
                own.give_up(thread, ENDLESS_S)
            raise RuntimeError("it computes without an end")

    signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOK_S, LOOK_S)


def _child(request: dict[str, Any], out: int) -> None:
    from tests.simulation import runs
    from tests.simulation.kinds import Fault

    _guard()
    chosen = None if request.get("faults") is None else [Fault(**one) for one in request["faults"]]
    outcome = runs.run(request["seed"], chosen, tracing=request.get("tracing", False))
    with os.fdopen(out, "w") as file:
        file.write(json.dumps(outcome.record()))


def run_in_child(request: dict[str, Any]) -> dict[str, Any]:
    """Run a seed in a child, and return its outcome."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(here)
        try:
            _child(request, there)
        except BaseException as error:  # noqa: BLE001  # said, and the child ends
            os.write(2, f"seed {request['seed']}: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as file:
        said = file.read()
    os.waitpid(pid, 0)
    if not said:
        return {"seed": request["seed"], "failure": "the simulation itself has failed: see above", "faults": []}
    outcome: dict[str, Any] = json.loads(said)
    return outcome


def main() -> None:
    """Answer requests until there are no more."""
    folder, *mutants = sys.argv[1:]
    for name in mutants:
        mutate(MUTANTS[name])
    machine.install()
    from tests.simulation import answers, drawing, runs

    from perseus_agent.clocks import gpu_worker, latency, rank_follower
    from perseus_operator.families.serving import work
    from perseus_operator.families.training.work import calibrator, frontier_loader
    from perseus_solver.rehearsal import deployment, refinement
    from perseus_solver.search import pool

    # The kernel's figure of what a thread has computed.
    gpu_worker.computed_s = lambda thread: thread.computed_s  # type: ignore[attr-defined]
    _take_time(rank_follower.RankFollower, "look")
    _parse_beside(frontier_loader, "open_frontier")
    _parse_beside(calibrator, "parse_calibration_result")
    for module, budget, share in (  # plans need not be good here, and each seed measures latencies of its own
        (latency, "READ_STEPS", 4),  # most turns of a GPU's thread read whether a change is in effect
        (pool, "_WORK", 400),
        (pool, "_WORK_ONE", 400),
        (refinement, "_WORK", 20),
        (deployment, "_POINTS", 10),
        (deployment, "_TIMES", 3),
        (deployment, "_FINALISTS", 6),
    ):
        setattr(module, budget, getattr(module, budget) // share)
    work.fit_and_table = functools.cache(work.fit_and_table)  # of the profile of engines, which all seeds share
    answers.share(Path(folder))
    sys.unraisablehook = lambda _: None
    gc.disable()
    runs.warm_up()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "draw" in request:
            drawn = drawing.draw(request["draw"], until_s=runs.FAULTS_S)
            answer: dict[str, Any] = {"draw": request["draw"], "faults": [asdict(fault) for fault in drawn]}
        else:
            answer = run_in_child(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

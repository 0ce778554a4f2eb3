"""Runs seeds in parallel, replays one, shrinks what fails: ``python -m tests.simulation --seeds 1000``.

This process is an ordinary one; the simulated machine is in its workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.simulation.mutant import Mutant
from tests.simulation.mutants import MUTANTS

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGE: Final = REPOSITORY / "docs" / "simulation.md"
SEEDS_OF_MUTANTS: Final = 1_000
"""Of which those run that draw what a mutant needs."""
KEPT: Final = Path(__file__).with_name("seeds") / "seeds.jsonl"
"""Seeds in which a promise was broken once, each with its faults and what was wrong. The faults stand there because
what a seed draws changes with each kind of fault that is added."""


@cache
def answers() -> tempfile.TemporaryDirectory[str]:
    """The folder in which seeds find what the solver has answered to others; it goes with this process. Mutants share
    it: none of them is in the solver."""
    return tempfile.TemporaryDirectory(prefix="perseus-answers-")


class Workers:
    """Processes that run seeds."""

    def __init__(self, count: int, mutant: str = "") -> None:
        command = [sys.executable, "-m", "tests.simulation.worker", answers().name, *([mutant] if mutant else [])]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
                env=environment,
                process_group=0,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the child that runs a seed
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def run(self, requests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Outcomes, as they come."""
        todo, done = queue.Queue[Any](), queue.Queue[Any]()
        for request in requests:
            todo.put(request)
        expected = todo.qsize()

        def serve(process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            while True:
                try:
                    request = todo.get_nowait()
                except queue.Empty:
                    return
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                done.put(json.loads(line) if line else None)
                if not line:
                    return

        for process in self._processes:
            threading.Thread(target=serve, args=(process,), daemon=True).start()
        for _ in range(expected):
            outcome = done.get()
            if outcome is None:
                raise SystemExit("a worker of the simulation has ended; see above")
            yield outcome


def shrink(workers: Workers, seed: int, failure: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The fewest faults of a seed that break the same promise."""
    kind = failure.partition(": ")[2][:11]
    (drawn,) = workers.run([{"draw": seed}])
    faults, outcome = drawn["faults"], {"failure": failure}
    place = 0
    while place < len(faults):
        fewer = faults[:place] + faults[place + 1 :]
        (tried,) = workers.run([{"seed": seed, "faults": fewer}])
        if kind in tried["failure"]:
            faults, outcome = fewer, tried
        else:
            place += 1
    return faults, outcome


def replay(seed: int) -> int:
    """Run one seed and print what happened; shrink it if it fails."""
    with Workers(1) as workers:
        (outcome,) = workers.run([{"seed": seed, "tracing": True}])
        if not outcome["failure"]:
            print("\n".join(outcome["trace"]))
            print(f"seed {seed}: kept, {outcome['steps']} steps, trace {outcome['digest'] & 0xFFFFFFFF:08x}")
            return 0
        faults, _ = shrink(workers, seed, outcome["failure"])
        (least,) = workers.run([{"seed": seed, "faults": faults, "tracing": True}])
        print("\n".join(least.get("trace", ())))  # none, if the simulation itself has failed
        print(f"seed {seed}: {outcome['failure']}")
        print(f"seed {seed}, with {len(faults)} of {len(outcome['faults'])} faults: {'; '.join(least['faults'])}")
        print(f"  {least['failure']}")
        print(json.dumps({"seed": seed, "why": "", "faults": faults}))
        return 1


def kept_seeds() -> list[dict[str, Any]]:
    """Seeds that have failed once: ``seed``, ``faults`` and ``why``."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()]


def run_many(seeds: Sequence[int], jobs: int, mutant: str = "", *, stop: bool = False) -> list[dict[str, Any]]:
    """Run seeds; say which failed, and how long it took. Returns the outcomes."""
    began_s, outcomes = time.monotonic(), list[dict[str, Any]]()
    with Workers(jobs, mutant) as workers:
        for outcome in workers.run({"seed": seed} for seed in seeds):
            outcomes.append(outcome)
            if outcome["failure"]:
                said = outcome["failure"].splitlines()[0]
                print(f"seed {outcome['seed']}: {said}\n    {'; '.join(outcome['faults'])}", flush=True)
                if stop:
                    break
    took_s = time.monotonic() - began_s
    failed = [outcome for outcome in outcomes if outcome["failure"]]
    hours = sum(outcome.get("simulated_s", 0.0) for outcome in outcomes) / 3600
    cpu_s = sum(outcome.get("cpu_s", 0.0) for outcome in outcomes)
    print(
        f"{len(outcomes)} seeds, {len(failed)} failed: {hours:.2f} simulated hours in {took_s:.0f} s"
        f" ({60 * len(outcomes) / took_s:.0f} seeds and {60 * hours / took_s:.2f} hours a minute;"
        f" {cpu_s / max(1, len(outcomes)):.2f} s of CPU a seed)"
    )
    return outcomes


def find_mutants(most: int, jobs: int, names: Sequence[str] = ()) -> dict[str, dict[str, Any] | None]:
    """Break the code in each way in turn, run seeds until one notices, and write the row of each into the table of the
    docs. Returns by mutant the outcome of the seed that noticed it; None: none has."""
    found = dict[str, dict[str, Any] | None]()
    with Workers(1) as honest:
        for mutant in [MUTANTS[name] for name in names] or MUTANTS.values():
            with Workers(jobs, mutant.name) as workers:
                outcome = _first_that_fails(workers, honest, mutant, most)
            found[mutant.name] = outcome
            said = "not found" if outcome is None else _said(outcome)
            print(f"{mutant.name}: {said}", flush=True)
            _record(mutant, outcome, most)
    print(f"{list(found.values()).count(None)} mutants not found within {most} seeds each")
    return found


def _said(outcome: dict[str, Any]) -> str:
    return f"seed {outcome['seed']}: {outcome['failure'].splitlines()[0]}"


def _first_that_fails(workers: Workers, honest: Workers, mutant: Mutant, most: int) -> dict[str, Any] | None:
    """The outcome of the first seed in which a promise is broken, and is kept by the code as it is (``honest``), of
    those that draw what the mutant needs."""
    seeds: Sequence[int] = range(SEEDS_OF_MUTANTS)
    if mutant.needs:
        drawn = {answer["draw"]: answer["faults"] for answer in workers.run({"draw": seed} for seed in seeds)}
        seeds = [seed for seed in seeds if mutant.may_show(drawn[seed])]
    outcomes = workers.run({"seed": seed} for seed in seeds[:most])
    for outcome in outcomes:
        if outcome["failure"]:
            (unbroken,) = honest.run([{"seed": outcome["seed"]}])
            if not unbroken["failure"]:
                return outcome
            print(f"{mutant.name}: seed {outcome['seed']} fails without it, too: {unbroken['failure']}", flush=True)
    return None


def _record(mutant: Mutant, outcome: dict[str, Any] | None, most: int) -> None:
    """Write the row of a mutant into the table."""
    by = f"none of {most} |" if outcome is None else f"seed {outcome['seed']} | {_broken(outcome['failure'])}"
    row = f"| `{mutant.name}` | {mutant.origin} | {by} |"
    lines = PAGE.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith(f"| `{mutant.name}` |")]
    last = max(number for number, line in enumerate(lines) if line.startswith(("| `", "|---|---|---|---|")))
    lines[places[0] if places else last + 1 : places[0] + 1 if places else last + 1] = [row]
    PAGE.write_text("\n".join(lines) + "\n")


def _broken(failure: str) -> str:
    """Which promise, or what else must never be: a defect that is logged, a thread that ends."""
    said = failure.splitlines()[0].partition(" s: ")[2]
    if raised := re.search(r"(\w+) raised (\w+)", said):
        return f"{raised[1]} ends with {raised[2]}"
    if ended := re.match(r"thread (\S+) of \S+ ended with (\w+)", said):
        return f"thread {ended[1]} ends with {ended[2]}"
    return said.partition(":")[0] or failure.partition(":")[0]


def main() -> int:
    """Entry point of ``make simulate``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one, and shrink it if it fails")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--mutant", default="", help="break the code on purpose; see mutants.py")
    parser.add_argument("--mutants", type=int, metavar="N", help="run up to N seeds against each mutant")
    parser.add_argument("--stop", action="store_true", help="stop at the first that fails")
    options = parser.parse_args()
    if options.mutants is not None:
        chosen = [options.mutant] if options.mutant else []
        return 1 if None in find_mutants(options.mutants, options.jobs, chosen).values() else 0
    if options.seed is not None:
        return replay(options.seed)
    seeds = range(options.first, options.first + options.seeds)
    outcomes = run_many(seeds, options.jobs, options.mutant, stop=options.stop)
    reached: dict[str, int] = {}
    for outcome in outcomes:
        for state in outcome.get("reached", ()):
            reached[state] = reached.get(state, 0) + 1
    for state, count in sorted(reached.items()):
        print(f"  reached in {count} seeds: {state}")
    return 1 if any(outcome["failure"] for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

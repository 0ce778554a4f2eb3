"""Runs seeds in parallel, replays one, shrinks what fails: ``python -m tests.simulation --seeds 1000``.

This process is an ordinary one; the simulated machine is in its workers.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.simulation.mutants import MUTANTS

REPOSITORY: Final = Path(__file__).resolve().parents[2]
KEPT: Final = Path(__file__).with_name("seeds") / "seeds.txt"


class Workers:
    """Processes that run seeds."""

    def __init__(self, count: int, mutant: str = "") -> None:
        command = [sys.executable, "-m", "tests.simulation.worker", *([mutant] if mutant else [])]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
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
        print("\n".join(least["trace"]))
        print(f"seed {seed}: {outcome['failure']}")
        print(f"seed {seed}, with {len(faults)} of {len(outcome['faults'])} faults: {'; '.join(least['faults'])}")
        print(f"  {least['failure']}")
        return 1


def kept_seeds() -> list[int]:
    """Seeds that have failed once."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


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
    """Break the code in each way in turn, and run seeds until one notices. Returns the outcome by mutant, with how many
    seeds it took; None: none did."""
    found: dict[str, dict[str, Any] | None] = {}
    for mutant in [MUTANTS[name] for name in names] or MUTANTS.values():
        found[mutant.name] = None
        with Workers(jobs, mutant.name) as workers:
            for count, outcome in enumerate(workers.run({"seed": seed} for seed in range(most)), 1):
                if outcome["failure"]:
                    found[mutant.name] = {**outcome, "seeds": count}
                    break
        said = found[mutant.name]
        by = (
            f"seed {said['seed']}, after {said['seeds']} | {said['failure'].splitlines()[0]}" if said else "not found |"
        )
        print(f"| {mutant.name} | {mutant.origin} | {by} |", flush=True)
    caught = sum(outcome is not None for outcome in found.values())
    print(f"{caught} of {len(found)} mutants found within {most} seeds each")
    return found


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
        return 0 if all(find_mutants(options.mutants, options.jobs, chosen).values()) else 1
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

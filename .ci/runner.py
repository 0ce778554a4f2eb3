"""Run the suites that a change can have affected; what they need is built beside them.

A suite runs again unless nothing that it reads has changed since it was green on this machine: ``suites.py`` says what
each reads. The commits at which suites were green are in the user's cache: a new machine runs everything. Suites run
one after the other, but for those that mostly wait. Without its environment nothing runs; after another failure the
others still do, so that a run of an hour tells all that it can. At its end stands for each suite whether it ran, was
not affected, or was skipped and why. Standard library only: there is no virtual environment yet.

Environment:
  CI_FULL=1        run every suite
  E2E_CLUSTER=0    leave out the suites that make a cluster
"""

# ruff: noqa: T201, S607  # a command-line program that runs the project's own commands

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

from second_try import MOST, FailedTests
from suites import BY_HAND, COMMON, PREPARATIONS, SUITES, Suite, of_cluster

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 85 * 60
"""Of the whole run: it has 90 minutes, of which five are reserved for clean-up."""
BUILD_S: Final = 20 * 60
"""How long a suite waits for a build without which it could run, too."""
CLEAN_UP_S: Final = 120
"""What a suite gets to end by itself once its time is over."""


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


class Failed(Exception):
    """Something that is a test has failed; the message names it."""


class GreenRuns:
    """The commits at which suites were green on this machine, in a file of the user's cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = Lock()
        self._machine = f"{platform.platform()} {platform.python_version()}"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        ours = isinstance(found, dict) and found.get("machine") == self._machine
        self._commits: dict[str, str] = found["commits"] if ours else {}
        clean = not _git("status", "--porcelain").stdout
        self._head = _git("rev-parse", "HEAD").stdout.strip() if clean else ""

    def covering(self, suite: Suite) -> str:
        """Return the commit of a green run since which no input of the suite has changed; empty if there is none."""
        commit = self._commits.get(suite.name, "")
        if not (commit and self._head and suite.inputs):
            return ""
        unchanged = _git("diff", "--quiet", commit, self._head, "--", *COMMON, *suite.inputs).returncode == 0
        return commit if unchanged else ""

    def record(self, suite: Suite) -> None:
        """Remember that the suite is green at this commit. A tree with uncommitted changes is no commit."""
        if not self._head:
            return
        with self._writing:
            self._commits[suite.name] = self._head
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": self._machine, "commits": self._commits}, indent=1)
            partial = self._path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._path)


class Preparing:
    """Preparations, one after the other beside the suites, once they are started.

    At the suites' own priority: the longest way through a run leads over the images.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._names = [name for name in PREPARATIONS if name in names]
        self._ends: dict[str, Future[int]] = {}
        self.took_s: dict[str, float] = {}
        """Of those that have ended."""

    def start(self) -> None:
        """Begin with the first."""
        self._ends = {name: self._executor.submit(self._run, name) for name in self._names}

    def _run(self, name: str) -> int:
        if self._stopped:
            return 1
        started_s = time.monotonic()
        with (self._folder / f"{name}.log").open("wb") as log:
            command = ["bash", "-c", PREPARATIONS[name].command]
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = self._process.wait()
        self.took_s[name] = time.monotonic() - started_s
        return code

    def lacking(self, name: str, patience_s: float) -> str:
        """Wait until a preparation has ended; return what is missing then, or an empty string.

        Raises:
            Failed: it is a test as well, and has failed.
        """
        started_s = time.monotonic()
        try:
            code = self._ends[name].result(max(0.0, patience_s))
        except TimeoutError:
            return f"`{PREPARATIONS[name].command}` still runs"
        print(f"--- {name} is ready; waited {time.monotonic() - started_s:.0f} s for it", flush=True)
        missing = [program for program in PREPARATIONS[name].programs if shutil.which(program) is None]
        if missing:
            return f"not on this machine: {', '.join(missing)}"
        if code:
            log = (self._folder / f"{name}.log").read_text(errors="replace")
            print(log[-4000:], flush=True)
            if PREPARATIONS[name].tests:
                raise Failed(name)
            return f"`{PREPARATIONS[name].command}` failed"
        return ""

    def stop(self) -> None:
        """End what still runs."""
        self._stopped = True
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._executor.shutdown(cancel_futures=True)


class Run:
    """One run of all suites, and its summary."""

    def __init__(self, green: GreenRuns, *, full: bool, cluster: bool) -> None:
        self._started_s = time.monotonic()
        self._green = green
        self._outcomes: list[tuple[str, str]] = []
        self._due: list[Suite] = []
        for suite in SUITES:
            if suite.clean_up and not cluster:
                self._outcomes.append((suite.name, "skipped: E2E_CLUSTER=0 asks for none"))
            elif not full and (commit := green.covering(suite)):
                self._outcomes.append(
                    (suite.name, f"not affected: nothing that it reads has changed since {commit[:10]}")
                )
            else:
                self._due.append(suite)
        needed = [name for suite in self._due for name in (*suite.after, *suite.better_after)]
        self._folder = ROOT / "out" / "ci"
        self._preparing = Preparing(needed, self._folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    @property
    def _left_s(self) -> float:
        return LIMIT_S - (time.monotonic() - self._started_s)

    def suites(self) -> None:
        """Run what is due.

        Raises:
            Failed: suites have failed.
        """
        setup, *others = self._due
        failed = []
        with ThreadPoolExecutor(max_workers=1) as lane:
            try:
                self._take(setup)
                for suite in filter(lambda suite: suite.alone, others):
                    failed += self._failures(suite, partial(self._take, suite))
                self._preparing.start()  # behind `make setup`: two of it would write one environment
                beside = {suite: lane.submit(self._take, suite) for suite in others if suite.beside}
                for suite in others:
                    if not (suite.alone or suite.beside):
                        failed += self._failures(suite, partial(self._take, suite))
                        failed += self._join(beside, only_ended=True)
                failed += self._join(beside)
            finally:
                self._stop()
        if failed:
            raise Failed(", ".join(failed))

    def _join(self, beside: dict[Suite, Future[None]], *, only_ended: bool = False) -> list[str]:
        """Print what suites beside the others have printed, once they have ended; return those that have failed."""
        failed = []
        for suite, end in tuple(beside.items()):
            if only_ended and not end.done():
                continue
            print(f"\n=== {suite.name}, which runs beside the others", flush=True)
            failed += self._failures(suite, beside.pop(suite).result)
            if (log := self._log(suite)).exists():
                print(log.read_text(encoding="utf-8", errors="replace"), flush=True)
        return failed

    @staticmethod
    def _failures(suite: Suite, outcome: Callable[[], None]) -> list[str]:
        try:
            outcome()
        except Failed as failed:
            print(f"\n=== {failed} FAILED", flush=True)
            return [suite.name]
        return []

    def _log(self, suite: Suite) -> Path:
        return self._folder / f"{suite.name}.log"

    def _stop(self) -> None:
        """End what still runs; what clears up after it still does."""
        self._stopped = True
        self._preparing.stop()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # `timeout` ends all that it has started
        for process in self._processes:
            process.wait()

    def _take(self, suite: Suite) -> None:
        """Run a suite unless something that it needs is missing, and remember whether it is green."""
        if reason := self._reason_to_skip(suite):
            self._outcomes.append((suite.name, f"skipped: {reason}"))
            print(f"\n=== {suite.name}: skipped: {reason}", flush=True)
            return
        without = self._without(suite)
        if self._stopped:
            return
        if self._run(suite) and not without:
            self._green.record(suite)

    def _reason_to_skip(self, suite: Suite) -> str:
        if suite.root and os.geteuid() != 0:
            return "needs root"
        for name in suite.after:
            if lacking := self._preparing.lacking(name, self._left_s - 60 * suite.minutes):
                return lacking
        if self._left_s < 60 * suite.minutes:
            return f"it takes {suite.minutes} minutes, and {self._left_s / 60:.0f} are left of {LIMIT_S // 60}"
        if suite.check:
            command = ["bash", "-c", suite.check]
            checked = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
            return "; ".join(checked.stderr.splitlines()) if checked.returncode else ""
        return ""

    def _without(self, suite: Suite) -> list[str]:
        """What the suite would use and does not have; it leaves out tests then."""
        lacking = {name: self._preparing.lacking(name, BUILD_S) for name in suite.better_after}
        for name, reason in lacking.items():
            if reason:
                print(f"--- {suite.name} runs without {name}: {reason}", flush=True)
        return [name for name, reason in lacking.items() if reason]

    def _run(self, suite: Suite) -> bool:
        """Return whether the suite is green at the first try.

        Raises:
            Failed: it is not green at the second either.
        """
        begins = f"--- {suite.name} begins beside" if suite.beside else f"\n=== {suite.name}"
        print(f"{begins}: {suite.command}", flush=True)
        started_s = time.monotonic()
        tests = FailedTests(self._folder / "tests" / suite.name)
        again: list[str] = []
        with self._log(suite).open("wb") if suite.beside else nullcontext() as log:
            code = self._execute(suite.command, tests.environment, log)
            if code and not self._stopped and len(tests.names) in range(1, MOST + 1):
                again = tests.names
                print(f"--- {suite.name}: once more, by themselves: {', '.join(again)}", flush=True)
                code = self._execute(suite.command, tests.again(), log)
        if suite.clean_up:
            code = subprocess.run(["bash", "-c", suite.clean_up], cwd=ROOT, check=False).returncode or code
        took = f"{time.monotonic() - started_s:.0f} s"
        if code:
            self._outcomes.append((suite.name, f"FAILED after {took}"))
            raise Failed(suite.name)
        self._outcomes.append((suite.name, f"ran: {took}" + "".join(f"; at the second try: {name}" for name in again)))
        return not again

    def _execute(self, command: str, environment: Mapping[str, str], log: BinaryIO | None) -> int:
        limit = ["timeout", "--signal=INT", f"--kill-after={CLEAN_UP_S}", f"{max(1.0, self._left_s):.0f}"]
        process = subprocess.Popen(
            [*limit, "bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=log and subprocess.STDOUT
        )
        self._processes.append(process)
        return process.wait()

    def end(self) -> None:
        """Print the summary."""
        ended = dict(self._outcomes)
        print("\n=== summary")
        for suite in SUITES:
            print(f"  {suite.name:20} {ended.get(suite.name, 'not reached')}")
        for name, took_s in self._preparing.took_s.items():
            print(f"  {name:20} made beside: {took_s:.0f} s")
        for name, reason in BY_HAND:
            print(f"  {'':20} left out: {reason}: make e2e-cluster SUITES={of_cluster(name)}")
        print(f"  {(time.monotonic() - self._started_s) / 60:.0f} minutes", flush=True)


def _interrupted(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the suites. Returns the exit code: 0 if all that ran are green."""
    signal.signal(signal.SIGTERM, _interrupted)
    os.environ.setdefault("PYTEST_ADDOPTS", "--durations=15 --durations-min=5")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    run = Run(
        GreenRuns(cache / "perseus-k8s" / "green-suites.json"),
        full=os.environ.get("CI_FULL") == "1",
        cluster=os.environ.get("E2E_CLUSTER") != "0",
    )
    try:
        run.suites()
    except Failed:
        return 1
    except KeyboardInterrupt:
        print("\n=== interrupted")
        return 1
    finally:
        run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the suites that a change can have affected, one after the other; what they need is built beside them.

A suite runs again unless nothing that it reads has changed since it was green on this machine. ``SUITES`` says what
each reads, and ``tests/contract/test_ci.py`` compares that with what its tests import. The commits at which suites were
green are in the user's cache: a new machine runs everything. The first failure ends the run. At its end stands for each
suite whether it ran, was not affected, or was skipped and why. Standard library only: there is no virtual environment
yet.

Where time goes, on two cores: ``make test`` takes five minutes of CPU and ``make slow`` two. Tests that start processes
mostly wait, so four of them run at once (``WAITING`` in the Makefile). Beside a load of six to eleven ``make
integration`` took four minutes so, ``make e2e`` with a real API server six and a half, ``make chart-test`` four and a
half. The suites of the cluster take 23 to 26 minutes: they share it, one after the other.

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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 85 * 60
"""Of the whole run: it has 90 minutes, of which five are reserved for clean-up."""
BUILD_S: Final = 20 * 60
"""How long a suite waits for a build without which it could run, too."""
CLEAN_UP_S: Final = 120
"""What a suite gets to end by itself once its time is over."""


@dataclass(frozen=True)
class Preparation:
    """What suites need and this project does not contain, made with the time that earlier suites leave over."""

    command: str
    programs: tuple[str, ...] = ()
    """They are on the PATH once the preparation has succeeded. Where they cannot be had, suites that need them are
    skipped."""
    tests: bool = False
    """It tests this project, too: where it has its programs and fails, the run has failed."""


_PACKAGES: Final = (
    "prometheus chromium chromium-driver mmdebstrap buildah runc containernetworking-plugins nftables conntrack "
    "iproute2 libseccomp-dev"
)
PREPARATIONS: Final = {
    # RUNLEVEL=1: no service is started.
    "packages": Preparation(
        f"dpkg -s {_PACKAGES} >/dev/null 2>&1 || {{ apt-get update -qq && "
        f"RUNLEVEL=1 apt-get install -qq -y --no-install-recommends {_PACKAGES}; }}",
        ("prometheus", "promtool", "chromium", "chromedriver", "mmdebstrap", "buildah"),
    ),
    # Modules are fetched: a second try finds what the first one already has.
    "control-plane": Preparation("make control-plane || make control-plane", ("go",)),
    "binaries": Preparation("make binaries || make binaries", ("go",)),
    "frameworks": Preparation("make frameworks || make frameworks", tests=True),
    "images": Preparation("make images", ("buildah", "mmdebstrap", "go"), tests=True),
}


@dataclass(frozen=True)
class Suite:
    """A command of the Makefile, and what it depends on."""

    name: str
    command: str
    inputs: tuple[str, ...] = ()
    """Paths as ``git diff`` takes them: a change in one runs the suite again. None named: it always runs."""
    after: tuple[str, ...] = ()
    """Preparations. Without their programs the suite is skipped."""
    better_after: tuple[str, ...] = ()
    """Preparations without whose programs the suite runs too, and says itself what it leaves out."""
    minutes: int = 0
    """It is skipped with less time left."""
    root: bool = False
    """It needs root."""
    check: str = ""
    """A command that fails, and says why, where the suite cannot run."""
    clean_up: str = ""
    """Runs after the suite, however that ended."""


_COMMON: Final = (".ci", "Makefile", "pyproject.toml", "requirements.lock", "deploy/build_compiled.py")
"""Inputs of every suite: how it is set up and started."""
_TESTS: Final = ("tests/*.py", "tests/doubles", "tests/execution")
_ROOMS: Final = ("agent", "bench", "client", "core", "operator", "proto", "runtime", "sim", "solver")
_ROOMS_OF_A_RELEASE: Final = ("client", "core", "proto", "runtime", "solver")
_ROOMS_OF_A_NODE: Final = ("agent", "bench", "client", "core", "proto", "runtime", "sim", "solver")
_ON_A_CLUSTER: Final = (
    *("up_and_down", "journey", "socket_resource", "energy_class", "controllers", "workload_kinds"),
    *("dynamic_resources", "identity"),
)
_BY_HAND: Final = (
    ("solver_scaling", "four minutes more"),
    ("solver_batch", "two minutes more"),
    ("framework_job", "its image with PyTorch takes minutes more"),
    ("faults", "twelve minutes more"),
    ("serving", "three minutes more"),
)
"""Suites on a cluster for which there is no time here."""


def _of_cluster(*names: str) -> str:
    return " ".join(f"tests/cluster/test_{name}.py" for name in names)


SUITES: Final = (
    Suite("setup", "make setup"),
    Suite("verify", "make verify"),
    Suite("test", "make test"),
    Suite("demo", "make demo"),
    Suite("docs", "make docs"),
    Suite("slow", "make slow", (*_ROOMS, *_TESTS, "tests/unit", "tests/laws")),
    Suite("integration", "make integration", (*_ROOMS, *_TESTS, "tests/integration", "deploy", "docs", "README.md")),
    Suite("e2e", "make e2e", (*_ROOMS, *_TESTS, "tests/e2e", "charts", "deploy"), better_after=("control-plane",)),
    Suite("chaos", "make chaos", (*_ROOMS, *_TESTS, "tests/e2e", "charts", "deploy"), better_after=("control-plane",)),
    Suite(
        "chart-test",
        "make chart-test",
        (*_ROOMS, *_TESTS, "tests/chart", "charts", "deploy", "docs"),
        better_after=("binaries",),
        minutes=7,
    ),
    Suite(
        "release-test",
        "make release-test",
        (*_ROOMS_OF_A_RELEASE, *_TESTS, "tests/release", "charts", "deploy", "requirements-images.lock"),
        minutes=8,
    ),
    Suite(
        "observability-test",
        "make observability-test",
        (*_ROOMS, *_TESTS, "tests/observability", "charts", "deploy", "docs", "requirements-docs.lock"),
        after=("packages",),
        minutes=6,
    ),
    Suite(
        "test-frameworks",
        "make test-frameworks",
        (*_ROOMS_OF_A_NODE, *_TESTS, "tests/frameworks", "examples", "requirements-frameworks.lock"),
        after=("frameworks",),
        minutes=6,
    ),
    Suite(
        "newcomer-test",
        "make newcomer-test",
        ("README.md", *_TESTS, "tests/newcomer", "*.c", "sim/perseus_sim/commands", "deploy/samples"),
        after=("packages",),
        minutes=6,
        root=True,
    ),
    Suite(
        "e2e-cluster",
        f'PERSEUS_IMAGES=out/images/perseus.tar make cluster e2e-cluster SUITES="{_of_cluster(*_ON_A_CLUSTER)}"',
        (*_ROOMS, *_TESTS, "tests/cluster", "charts", "deploy", "docs", "examples", "requirements-images.lock"),
        after=("packages", "binaries", "images"),
        minutes=29,
        root=True,
        check=".venv/bin/python deploy/cluster/cluster.py check >/dev/null",
        clean_up="make cluster-down",
    ),
)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


class Failed(Exception):
    """Something that is a test has failed; the message names it."""


class GreenRuns:
    """The commits at which suites were green on this machine, in a file of the user's cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        unchanged = _git("diff", "--quiet", commit, self._head, "--", *_COMMON, *suite.inputs).returncode == 0
        return commit if unchanged else ""

    def record(self, suite: Suite) -> None:
        """Remember that the suite is green at this commit. A tree with uncommitted changes is no commit."""
        if not self._head:
            return
        self._commits[suite.name] = self._head
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self._machine, "commits": self._commits}, indent=1)
        partial = self._path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path)


class Preparing:
    """Preparations, one after the other beside the suites and with the least priority, once they are started."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._names = [name for name in PREPARATIONS if name in names]
        self._ends: dict[str, Future[int]] = {}

    def start(self) -> None:
        """Begin with the first."""
        self._ends = {name: self._executor.submit(self._run, name) for name in self._names}

    def _run(self, name: str) -> int:
        if self._stopped:
            return 1
        with (self._folder / f"{name}.log").open("wb") as log:
            command = ["nice", "-n", "19", "bash", "-c", PREPARATIONS[name].command]
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._process.wait()

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
        self._preparing = Preparing(needed, ROOT / "out" / "ci")

    @property
    def _left_s(self) -> float:
        return LIMIT_S - (time.monotonic() - self._started_s)

    def suites(self) -> None:
        """Run what is due.

        Raises:
            Failed: a suite has failed.
        """
        for number, suite in enumerate(self._due):
            if number == 1:
                self._preparing.start()  # behind `make setup`: two of it would write one environment
            if reason := self._reason_to_skip(suite):
                self._outcomes.append((suite.name, f"skipped: {reason}"))
                print(f"\n=== {suite.name}: skipped: {reason}", flush=True)
                continue
            without = self._without(suite)
            self._run(suite)
            if not without:
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

    def _run(self, suite: Suite) -> None:
        print(f"\n=== {suite.name}: {suite.command}", flush=True)
        started_s = time.monotonic()
        limit = ["timeout", "--signal=INT", f"--kill-after={CLEAN_UP_S}", f"{max(1.0, self._left_s):.0f}"]
        code = subprocess.run([*limit, "bash", "-c", suite.command], cwd=ROOT, check=False).returncode
        if suite.clean_up:
            code = subprocess.run(["bash", "-c", suite.clean_up], cwd=ROOT, check=False).returncode or code
        took = f"{time.monotonic() - started_s:.0f} s"
        if code:
            self._outcomes.append((suite.name, f"FAILED after {took}"))
            raise Failed(suite.name)
        self._outcomes.append((suite.name, f"ran: {took}"))

    def end(self) -> None:
        """Stop what runs beside the suites, and print the summary."""
        self._preparing.stop()
        ended = dict(self._outcomes)
        print("\n=== summary")
        for suite in SUITES:
            print(f"  {suite.name:20} {ended.get(suite.name, 'not reached')}")
        for name, reason in _BY_HAND:
            print(f"  {'':20} left out: {reason}: make e2e-cluster SUITES={_of_cluster(name)}")
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
    except Failed as failed:
        print(f"\n=== {failed} FAILED")
        return 1
    finally:
        run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

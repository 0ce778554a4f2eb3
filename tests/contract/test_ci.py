"""The table of suites in .ci/suites.py, and .ci/runner.py, which runs them.

Every folder of tests has a suite, and a suite names all that its tests use: what it does not name can change without
the suite being run again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "perseus_agent": "agent",
    "perseus_bench": "bench",
    "perseus_client": "client",
    "perseus_core": "core",
    "perseus_operator": "operator",
    "perseus_proto": "proto",
    "perseus_reader": "agent",
    "perseus_runtime": "runtime",
    "perseus_sim": "sim",
    "perseus_solver": "solver",
}
OURS = re.compile(rf"\b(?:{'|'.join(ROOMS)})(?:\.\w+)*")
"""A module of ours in a test, imported or in a command line."""
OF_TESTS = re.compile(r"^from (tests(?:\.\w+)*) import|^from tests import (\w+)", re.MULTILINE)
WITHOUT_SUITE = {
    "bench": "figures, never part of CI",
    "doubles": "used by the others",
    "execution": "used by the others",
    "vllm": "6 GB and a minute to start an engine: by hand, after a change of the plugin and before a release",
}


def _load() -> ModuleType:
    """The runner, which imports the table as a program of its folder does."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        return importlib.import_module("runner")
    finally:
        sys.path.pop(0)


ci = _load()
table = sys.modules["suites"]
SUITES: Mapping[str, Any] = {suite.name: suite for suite in ci.SUITES}


def _files(*paths: str) -> set[str]:
    """Tracked and new files under these paths, as git takes them."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    return set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(*ROOMS)


def _tests_used(files: Iterable[Path]) -> set[Path]:
    """These files of tests, and what they import of others."""
    seen, waiting = set[Path](), list(files)
    while waiting:
        file = waiting.pop()
        if file in seen or not file.exists():
            continue
        seen.add(file)
        waiting += [
            ROOT.joinpath(*(module or f"tests.{name}").split(".")).with_suffix(".py")
            for module, name in OF_TESTS.findall(file.read_text(encoding="utf-8"))
        ]
    return seen


def _rooms(files: Iterable[Path]) -> set[str]:
    """The rooms that these files of tests use, themselves or by what they import."""
    graph, used = _graph(), set[str]()
    for name in {name for file in _tests_used(files) for name in OURS.findall(file.read_text(encoding="utf-8"))}:
        module = name
        while module not in graph.modules:
            module = module.rpartition(".")[0]
        used |= {module} | graph.find_upstream_modules(module)
    return {ROOMS[module.partition(".")[0]] for module in used}


def _tests_of(suite: Any) -> list[Path]:
    named = [path for path in suite.inputs if re.fullmatch(r"tests/\w+", path)]
    return [file for path in named if Path(path).name not in WITHOUT_SUITE for file in (ROOT / path).rglob("*.py")]


def test_every_folder_of_tests_has_a_suite() -> None:
    folders = {Path(file).parts[1] for file in _files("tests/*/*.py")} - set(WITHOUT_SUITE)
    always = {"unit", "laws", "contract"}  # make test
    named = {path.removeprefix("tests/") for suite in SUITES.values() for path in suite.inputs}
    assert folders - always - named == set()


def test_every_suite_is_a_command_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [suite.command for suite in SUITES.values()] + [p.command for p in ci.PREPARATIONS.values()]
    named = {target for command in commands for target in re.findall(r"\bmake ((?:[a-z0-9-]+ ?)+)", command)}
    assert {target for group in named for target in group.split()} - targets == set()


def test_every_input_exists() -> None:
    nowhere = {(suite.name, path) for suite in SUITES.values() for path in suite.inputs if not _files(path)}
    assert nowhere == set()
    assert [path for path in ci.COMMON if not _files(path)] == []


WITH_TESTS = [name for name, suite in SUITES.items() if _tests_of(suite)]


@pytest.mark.parametrize("name", WITH_TESTS)
def test_a_suite_names_every_room_that_its_tests_use(name: str) -> None:
    tests = _tests_of(SUITES[name])
    assert _rooms(tests) - set(SUITES[name].inputs) == set()


@pytest.mark.parametrize("name", WITH_TESTS)
def test_a_suite_names_every_file_of_tests_that_its_tests_use(name: str) -> None:
    used = {str(file.relative_to(ROOT)) for file in _tests_used(_tests_of(SUITES[name]))}
    assert used - _files(*SUITES[name].inputs) == set()


def test_a_test_of_one_suite_is_no_input_of_another_that_does_not_name_it() -> None:
    suites = {name: {file.relative_to(ROOT).parts[1] for file in _tests_of(SUITES[name])} for name in WITH_TESTS}
    for name, folders in suites.items():
        others = set().union(*suites.values()) - folders
        tests = {
            Path(file) for file in _files(*SUITES[name].inputs) if file.startswith("tests/") and file.endswith(".py")
        }
        foreign = {str(file) for file in tests if file.parts[1] in others}
        assert foreign <= set(SUITES[name].inputs), name


class _Repository:
    """A repository with one suite, for the memory of green runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cache = folder / "repository", folder / "cache" / "green.json"
        self.folder.mkdir()
        monkeypatch.setattr(ci, "ROOT", self.folder)
        self.git("init", "-q")
        self.git("config", "user.email", "a@b")
        self.git("config", "user.name", "a")
        self.suite = ci.Suite("solver", "make solver", ("solver",))

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True)

    def commit(self, path: str, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        self.git("add", ".")
        self.git("commit", "-q", "-m", "x")

    @property
    def green(self) -> Any:
        return ci.GreenRuns(self.cache)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Repository:
    made = _Repository(tmp_path, monkeypatch)
    made.commit("solver/a.py", "1")
    return made


def test_a_suite_runs_until_it_is_green_and_again_when_an_input_changes(repository: _Repository) -> None:
    assert not repository.green.covering(repository.suite)
    repository.green.record(repository.suite)
    assert repository.green.covering(repository.suite)
    repository.commit("docs/a.md", "no input of the suite")
    assert repository.green.covering(repository.suite)
    repository.commit("solver/a.py", "2")
    assert not repository.green.covering(repository.suite)
    repository.green.record(repository.suite)
    repository.commit("pyproject.toml", "an input of every suite")
    assert not repository.green.covering(repository.suite)


def test_a_suite_without_inputs_always_runs(repository: _Repository) -> None:
    suite = ci.Suite("test", "make test")
    repository.green.record(suite)
    assert not repository.green.covering(suite)


def test_uncommitted_changes_are_neither_covered_nor_remembered(repository: _Repository) -> None:
    repository.green.record(repository.suite)
    (repository.folder / "solver" / "new.py").write_text("1")
    assert not repository.green.covering(repository.suite)
    repository.green.record(repository.suite)
    repository.commit("solver/new.py", "1")
    assert not repository.green.covering(repository.suite)


def test_a_commit_that_this_clone_lacks_covers_nothing(repository: _Repository) -> None:
    repository.green.record(repository.suite)
    repository.cache.write_text(re.sub(r"[0-9a-f]{40}", "0" * 40, repository.cache.read_text()))
    assert not repository.green.covering(repository.suite)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": "another", "commits": {"solver": "HEAD"}}'])
def test_a_damaged_memory_or_another_machines_covers_nothing(repository: _Repository, text: str) -> None:
    repository.cache.parent.mkdir()
    repository.cache.write_text(text)
    assert not repository.green.covering(repository.suite)


def test_preparations_begin_once_the_environment_is_there_and_what_runs_alone_has_run(
    repository: _Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = ci.Suite("setup", "sleep 0.3; touch environment")
    images = ci.Suite("images", "test -e built", after=("uses",))
    demo = ci.Suite("demo", "sleep 0.3; test ! -e built", alone=True)
    monkeypatch.setattr(ci, "SUITES", (setup, images, demo))
    monkeypatch.setattr(ci, "PREPARATIONS", {"uses": table.Preparation("test -f environment && touch built")})
    run = ci.Run(repository.green, full=True, cluster=True)
    run.suites()
    run.end()
    assert [outcome.partition(":")[0] for _, outcome in run._outcomes] == ["ran", "ran", "ran"]


class _Lanes:
    """Runs of suites that write when they begin and end into one file."""

    def __init__(self, repository: _Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        self._repository, self._monkeypatch = repository, monkeypatch
        self.log = repository.folder / "log"

    def run(self, *suites: Any) -> dict[str, str]:
        """What is said of each suite at the end."""
        self._monkeypatch.setattr(ci, "SUITES", (ci.Suite("setup", "true"), *suites))
        self._monkeypatch.setattr(ci, "PREPARATIONS", {})
        run = ci.Run(self._repository.green, full=True, cluster=True)
        with contextlib.suppress(ci.Failed):
            run.suites()
        run.end()
        return {name: outcome.partition(" ")[0].rstrip(":") for name, outcome in run._outcomes}

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def lanes(repository: _Repository, monkeypatch: pytest.MonkeyPatch) -> _Lanes:
    return _Lanes(repository, monkeypatch)


def test_a_suite_that_waits_runs_beside_the_others(lanes: _Lanes, capfd: pytest.CaptureFixture[str]) -> None:
    waits = ci.Suite("cluster", 'echo wai""ted; until test -e seen; do sleep 0.05; done', beside=True)
    assert lanes.run(waits, ci.Suite("units", "touch seen")) == {"setup": "ran", "cluster": "ran", "units": "ran"}
    printed = capfd.readouterr().out
    assert printed.index("=== units") < printed.index("=== cluster") < printed.index("waited")


def test_a_failure_beside_the_others_fails_the_run(lanes: _Lanes) -> None:
    assert lanes.run(ci.Suite("cluster", "false", beside=True), ci.Suite("units", "true"))["cluster"] == "FAILED"


def test_after_a_failure_the_others_still_run(lanes: _Lanes) -> None:
    waits = ci.Suite("cluster", "until test -e done; do sleep 0.05; done", beside=True, clean_up="echo cleared >> log")
    suites = waits, ci.Suite("units", "false"), ci.Suite("chart", "touch done")
    assert lanes.run(*suites) == {"setup": "ran", "units": "FAILED", "cluster": "ran", "chart": "ran"}
    assert lanes.lines == ["cleared"]


def test_an_interruption_ends_what_runs_beside_and_clears_up_after_it(
    lanes: _Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", str(os.getpid()))
    waits = ci.Suite("cluster", "touch begun; sleep 600", beside=True, clean_up="echo cleared >> log")
    stops = ci.Suite("units", "until test -e begun; do sleep 0.05; done; kill -TERM $RUN; sleep 600")
    previous = signal.signal(signal.SIGTERM, ci._interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(waits, stops)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert lanes.lines == ["cleared"]


UNSTEADY = """
import pathlib
import pytest

def count(name):
    tries = pathlib.Path(name)
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    return len(tries.read_text())

def test_first():
    count("first")

@pytest.mark.parametrize("number", range({unsteady}))
def test_unsteady(number):
    assert count(f"unsteady-{number}") > 1

@pytest.mark.parametrize("number", range({broken}))
def test_broken(number):
    assert not count(f"broken-{number}")
"""


def _pytest(repository: _Repository, *, unsteady: int = 0, broken: int = 0) -> Any:
    text = UNSTEADY.replace("{unsteady}", str(unsteady)).replace("{broken}", str(broken))
    (repository.folder / "test_a.py").write_text(text)
    (repository.folder / "test_b.py").write_text("def test_b():\n    open('b', 'a').write('x')\n")
    repository.commit(".gitignore", "*\n!.gitignore\n")
    command = (
        f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -c /dev/null --rootdir . test_a.py test_b.py"
    )
    return ci.Suite("units", command, ("solver",))


def test_a_test_that_passes_at_the_second_try_is_named_and_its_suite_is_not_remembered(
    lanes: _Lanes, repository: _Repository, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = _pytest(repository, unsteady=1)
    assert lanes.run(suite) == {"setup": "ran", "units": "ran"}
    assert "at the second try: test_a.py::test_unsteady[0]" in capfd.readouterr().out.partition("=== summary")[2]
    assert not repository.green.covering(suite)
    assert (repository.folder / "first").read_text() == "xx", "the whole file"
    assert (repository.folder / "b").read_text() == "x", "no other file"


@pytest.mark.parametrize(("unsteady", "broken", "tries"), [(0, 1, "xx"), (1, 1, "xx"), (4, 0, "x")])
def test_a_suite_fails_whose_tests_fail_twice_or_are_many(
    lanes: _Lanes, repository: _Repository, unsteady: int, broken: int, tries: str
) -> None:
    assert lanes.run(_pytest(repository, unsteady=unsteady, broken=broken)) == {"setup": "ran", "units": "FAILED"}
    assert (repository.folder / "first").read_text() == tries


def test_a_failure_of_an_earlier_run_is_no_failure_of_this_one(lanes: _Lanes, repository: _Repository) -> None:
    assert lanes.run(_pytest(repository, broken=1))["units"] == "FAILED"
    fails = ci.Suite("units", "echo tried >> log; false")
    assert lanes.run(fails)["units"] == "FAILED"
    assert lanes.lines == ["tried"]

"""The suites of tests, what each reads, and what they need beside it. ``runner.py`` runs them.

``tests/contract/test_ci.py`` compares what a suite reads with what its tests import. Standard library only: there is no
virtual environment yet.

Where time goes, on two cores: ``make test`` takes five minutes of CPU and ``make slow`` two. Tests that start processes
mostly wait, so four of them run at once (``WAITING`` in the Makefile). Beside a load of six to eleven ``make
integration`` took four minutes so, ``make e2e`` with a real API server six and a half, ``make chart-test`` four and a
half. The suites of the cluster take 33 to 37 minutes, most of which they wait: they run one after the other, beside
all other suites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
    "binaries": Preparation("make binaries WORKLOADS= || make binaries WORKLOADS=", ("go",)),
    "images": Preparation("make images", ("buildah", "mmdebstrap", "go"), tests=True),
    "frameworks": Preparation("make frameworks || make frameworks", tests=True),
    # On a new machine these take longer than all before, and one suite of many wants them: they get what time of the
    # processors the suites leave. Niceness counts within a session alone, its group's among sessions.
    "workloads": Preparation(
        "echo 19 2>/dev/null >/proc/self/autogroup; nice -n 19 make binaries || nice -n 19 make binaries", ("go",)
    ),
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
    alone: bool = False
    """It runs before anything is built: what it measures takes a machine that does nothing else."""
    beside: bool = False
    """It runs beside the others, once what it needs is there; what it prints follows at its end."""


COMMON: Final = (".ci", "Makefile", "pyproject.toml", "requirements.lock", "deploy/build_compiled.py")
"""Inputs of every suite: how it is set up and started."""
_TESTS: Final = (":(glob)tests/*.py", "tests/doubles", "tests/execution", "tests/unit/operator/conftest.py")
"""What suites share. Without ``:(glob)`` a ``*`` of git matches folders, too."""
_PRODUCT: Final = ("agent", "client", "core", "operator", "proto", "runtime", "sim", "solver")
_ROOMS: Final = (*_PRODUCT, "bench")
_ROOMS_OF_A_RELEASE: Final = ("client", "core", "proto", "runtime", "solver")
_ROOMS_OF_A_NODE: Final = ("agent", "bench", "client", "core", "proto", "runtime", "sim", "solver")
_END_TO_END: Final = (*_PRODUCT, *_TESTS, "tests/e2e", "tests/bench/operator.py", "charts", "deploy")
_ON_A_CLUSTER: Final = ("up_and_down", "journey", "socket_resource", "energy_class", "identity", "serving")
_WITH_WORKLOADS: Final = ("controllers", "workload_kinds", "dynamic_resources")
BY_HAND: Final = (
    ("solver_scaling", "four minutes more"),
    ("solver_batch", "two minutes more"),
    ("framework_job", "its image with PyTorch takes minutes more"),
    ("faults", "twelve minutes more"),
    ("serving_day", "half an hour more"),
)
"""Suites on a cluster for which there is no time here."""


def of_cluster(*names: str) -> str:
    """Return the files of these suites, as the Makefile takes them."""
    return " ".join(f"tests/cluster/test_{name}.py" for name in names)


def _suite_of_cluster(name: str, suites: tuple[str, ...], needs: str, minutes: int, settings: str = "") -> Suite:
    command = f'PERSEUS_IMAGES=out/images/perseus.tar make cluster e2e-cluster SUITES="{of_cluster(*suites)}"'
    inputs = (*_PRODUCT, *_TESTS, "tests/cluster", "charts", "deploy", "docs", "examples", "requirements-images.lock")
    return Suite(
        name,
        command + settings,
        inputs,
        after=("packages", needs, "images"),
        minutes=minutes,
        root=True,
        check=".venv/bin/python deploy/cluster/cluster.py check >/dev/null",
        clean_up="make cluster-down",
        beside=True,
    )


SUITES: Final = (
    # All that later suites install: pip must not write an environment in which tests run beside it.
    Suite("setup", "make setup && make .venv/.installed-docs .venv/.installed-release"),
    Suite("demo", "make demo", alone=True),
    Suite("verify", "make verify"),
    Suite("test", "make test"),
    Suite("docs", "make docs"),
    Suite(
        "slow",
        "make slow",
        (*_ROOMS, *_TESTS, "tests/unit", "tests/laws", "tests/bench", "tests/integration/client_agent.py"),
    ),
    Suite("integration", "make integration", (*_ROOMS, *_TESTS, "tests/integration", "deploy", "docs", "README.md")),
    Suite("simulate", "make simulate SEEDS=150", (*_PRODUCT, *_TESTS, "tests/simulation"), minutes=4),
    Suite("e2e", "make e2e", _END_TO_END, better_after=("control-plane",)),
    Suite("chaos", "make chaos", _END_TO_END, better_after=("control-plane",)),
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
        (*_PRODUCT, *_TESTS, "tests/observability", "charts", "deploy", "docs", "requirements-docs.lock"),
        after=("packages",),
        minutes=6,
    ),
    Suite(
        "test-frameworks",
        "make test-frameworks",
        (*_ROOMS_OF_A_NODE, *_TESTS, "tests/frameworks", "examples", "requirements-frameworks.lock"),
        after=("frameworks",),
        minutes=8,
    ),
    Suite(
        "newcomer-test",
        "make newcomer-test",
        ("README.md", *_TESTS, "tests/newcomer", "*.c", "sim/perseus_sim/commands", "deploy/samples"),
        after=("packages",),
        minutes=6,
        root=True,
    ),
    _suite_of_cluster("e2e-cluster", _ON_A_CLUSTER, "binaries", 24, " WORKLOADS="),
    _suite_of_cluster("e2e-workloads", _WITH_WORKLOADS, "workloads", 14),
)

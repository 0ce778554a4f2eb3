"""Fixtures of all tests, and the rule for generated inputs.

hypothesis generates the same inputs in every run and without a time limit, so that no result depends on chance or
load. HYPOTHESIS_PROFILE=explore generates new ones.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tests.slow_tests import slow_tests

from perseus_runtime.direct import bypass_proxies

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
if settings.default.derandomize:
    # Otherwise it also tries the numbers in all modules of ours that are loaded by then: those that earlier tests need.
    providers._get_local_constants = Constants

REPOSITORY = Path(__file__).resolve().parent.parent
bypass_proxies()  # all servers of tests are on loopback


@pytest.fixture(scope="session")
def sosp24() -> Path:
    """Folder with the public measurements of the SOSP'24 artifact."""
    return _public_data("sosp24")


@pytest.fixture(scope="session")
def recipes() -> Path:
    """Folder with the settings of NVIDIA's recipes for Megatron."""
    return _public_data("recipes")


def _public_data(name: str) -> Path:
    """A folder of public data, which is not part of the repository; PERSEUS_DATA names another place."""
    folder = Path(os.environ.get("PERSEUS_DATA", REPOSITORY.parent / "shared" / "data")) / name
    if not folder.is_dir():
        pytest.skip(f"nothing at {folder}: set PERSEUS_DATA to the folder that holds {name}/")
    return folder


@pytest.fixture(scope="module")
def short_search() -> Iterator[None]:
    """Search with a tenth of the work, for a module whose tests hold of every plan, however good it is."""
    from perseus_solver.search import pool

    with pytest.MonkeyPatch.context() as patch:
        for budget in ("_WORK", "_WORK_ONE"):
            patch.setattr(pool, budget, getattr(pool, budget) / 10)
        yield


@pytest.fixture(scope="session")
def ipv6() -> None:
    """Skip a test that needs IPv6 on this machine's loopback, if there is none."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine's loopback: {error}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that take longer than they should; with pytest-xdist where all reports arrive."""
    if lines := slow_tests([report for reports in terminalreporter.stats.values() for report in reports]):
        terminalreporter.section(lines[0])
        for line in lines[1:]:
            terminalreporter.line(line)

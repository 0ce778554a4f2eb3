"""The tests of the embedded API server pass on the real one too, so it behaves like Kubernetes where they look."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perseus_sim.cluster.api_servers import Feature, Server

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.needs(Feature.CONTROLLERS)
def test_the_embedded_servers_tests_pass_on_the_real_server(server: Server) -> None:
    programs = [str(server.plane.assets)] if server.plane else []
    path = os.pathsep.join([*programs, os.environ["PATH"]])
    tests = sorted(str(file) for file in ROOT.glob("tests/integration/test_apiserver*.py"))
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # of this run alone
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "PERSEUS_TEST_KUBECONFIG": str(server.kubeconfig), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout

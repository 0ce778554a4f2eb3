"""A worker of the solver beside the operator that started it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.waiting import eventually

from perseus_operator.solving import worker


def test_a_worker_lets_the_operator_go_first() -> None:
    command = [sys.executable, "-m", worker.__name__, "4096", "solve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        niceness = eventually(lambda: os.getpriority(os.PRIO_PROCESS, process.pid), "it gives way")
        process.kill()
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0)

"""Child processes that never outlive their parent: each has a log file, they are stopped in reverse order of their
start, and the kernel sends them a signal if the parent is killed.

What the processes do is not this module's concern.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[2]):
    os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Run between fork and the real program, in a process of its own: Python code after a fork of this one, which has
threads and gRPC, can deadlock. A parent killed with SIGKILL cannot clean up, so the kernel signals the child."""


class StartFailed(RuntimeError):
    """A process ended, or did not become ready in time; the message holds the end of its log."""


class Child:
    """One process and its log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.popen = popen
        self.log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def tail(self, lines: int = 20) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.running:
            self.popen.send_signal(number)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for a sign of readiness.

        Raises:
            StartFailed: the process ended, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                raise StartFailed(f"{self.name} ended with code {self.popen.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.name} was not ready after {timeout_s:g} s:\n{self.tail()}")
            time.sleep(0.02)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Send SIGTERM, then SIGKILL after the timeout; returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Processes:
    """The children of one run; leaving the context stops those that still run, the youngest first."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        on_our_death: signal.Signals = signal.SIGTERM,
    ) -> Child:
        """Start a process whose output goes to ``<logs>/<name>.log``.

        It gets a session of its own, so Ctrl-C reaches only this process, which stops its children in order. If this
        process is killed, or the thread that calls this ends, the child gets ``on_our_death``: by default SIGTERM, so
        that an agent still restores the clocks.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(int(on_our_death)), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        child = Child(name, popen, log)
        self._children.append(child)
        return child

    def stop(self) -> None:
        """Stop all, in reverse order of their start: an operator before the API server that it needs."""
        while self._children:
            self._children.pop().stop()

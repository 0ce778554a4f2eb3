"""Trial: an agent is killed while its lock is in force; the next agent must find the lock in the journal and reset it.

Real processes: one locks the GPU as the agent does (journal first) and is killed with SIGKILL, then ``perseus-agent``
itself is started with the same journal. Both work in a folder of their own, so that no running agent is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from perseus_agent.clocks.journal import decode_journal
from perseus_agent.errors import AgentError, JournalError
from perseus_bench.bench import Bench
from perseus_bench.report import ClockScan, Restoration

READ_BACK_S: Final = 0.05
PATIENCE_S: Final = 60.0
"""For a start of the agent: some drivers take tens of seconds to open."""
STOP_S: Final = 30.0
LOCKED: Final = "locked"
"""What the first process writes once the clock is locked."""
_SETTINGS: Final = "PERSEUS_AGENT_"


class RestorationFailed(AgentError):
    """A process of the trial did not start or ended by itself."""


class Agents(Protocol):
    """The processes of the trial."""

    def lock_and_die(self, mhz: int) -> None:
        """Lock the clock in a process of its own, journal first, and kill it with SIGKILL."""

    def start(self) -> None:
        """Start an agent with the same journal."""

    def check(self) -> None:
        """Raise ``RestorationFailed`` if the agent has ended."""

    def stop(self) -> bool:
        """Stop whatever runs. Returns whether the journal lists no GPU any more."""


def restore_after_kill(bench: Bench, scan: ClockScan, agents: Agents) -> Restoration:
    """Kill an agent and start the next one.

    Args:
        bench: the GPU under test.
        scan: of the same GPU: of the clocks that it reaches, the one farthest from its default clock is locked.
        agents: the processes.

    Raises:
        RestorationFailed: see there.
        DeviceError: the driver refused a reading.
        Interrupted: the user ended the run.
    """
    usable = [point.requested_mhz for point in scan.points if point.requested_mhz <= scan.top_usable_mhz]
    locked_mhz = max(usable, key=lambda clock: abs(clock - scan.default_mhz))
    restored_s: float | None = None
    try:
        with bench.working():
            bench.reset()
            agents.lock_and_die(locked_mhz)
            until_s = bench.now_s + 2.0
            while not (survived := bench.reads_as(locked_mhz)) and bench.now_s < until_s:
                bench.wait(READ_BACK_S)
            begin_s = bench.now_s
            agents.start()
            while restored_s is None and bench.now_s < begin_s + PATIENCE_S:
                agents.check()
                if not bench.reads_as(locked_mhz):
                    restored_s = bench.now_s - begin_s
                bench.wait(READ_BACK_S / 10)
    finally:
        empty = agents.stop()
    return Restoration(locked_mhz, survived, restored_s if survived else None, empty)


class AgentProcesses:
    """The real ones."""

    def __init__(self, devices: str, gpu_uuid: str, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Prepare them.

        Args:
            devices: the setting ``--devices``.
            gpu_uuid: the GPU under test.
            folder: an empty folder for journal, sockets and log.
            environment: of this process; settings of the node's agent are left out.
        """
        self._devices = devices
        self._gpu = gpu_uuid
        self._folder = folder
        self._journal = folder / "journal.json"
        self._environment = {key: value for key, value in environment.items() if not key.startswith(_SETTINGS)}
        self._running: subprocess.Popen[str] | None = None

    def lock_and_die(self, mhz: int) -> None:
        given = (self._devices, self._gpu, str(mhz), str(self._journal))
        process = self._run(["perseus_bench.locker", *given], stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        self._running = None
        if line.strip() != LOCKED:
            raise RestorationFailed(f"the process that locks the clock has failed: {self._log()}")

    def start(self) -> None:
        flags = {
            "devices": self._devices,
            "journal": self._journal,
            "socket": self._folder / "agent.sock",
            "grpc-address": f"unix:{self._folder / 'grpc.sock'}",
            "pod-resources-socket": self._folder / "no-kubelet.sock",
            "keeper-socket": self._folder / "no-keeper.sock",
            "metrics-address": "",
        }
        self._run(["perseus_agent", "--insecure", *(f"--{name}={value}" for name, value in flags.items())])

    def check(self) -> None:
        if self._running is not None and self._running.poll() is not None:
            raise RestorationFailed(f"the agent has ended: {self._log()}")

    def stop(self) -> bool:
        if self._running is not None:
            self._running.terminate()
            try:
                self._running.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait()
        try:
            return not decode_journal(self._journal.read_bytes()).locked
        except (OSError, JournalError):
            return False

    def _run(self, module: Sequence[str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        with (self._folder / "log").open("a", encoding="utf-8") as log:
            self._running = subprocess.Popen(
                [sys.executable, "-m", *module], env=self._environment, stdout=stdout, stderr=log, text=True
            )
        return self._running

    def _log(self) -> str:
        lines = (self._folder / "log").read_text(encoding="utf-8").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

"""Starts the agent, watches it, and gives back every GPU that the agent leaves locked, whatever became of the agent.

It is the first process of the agent's container: a container runtime kills what is left in a container when that one
ends, and the kernel spares it when the container's memory is used up. It reads nothing but signals, the ledger and the
agent's exit code: no socket, no file that a pod can write. It writes nothing but resets and, after these, the journal.

    the agent ends, in whatever way ─┐
    the agent is silent, owes a GPU ─┴► kill it ► reset each owed GPU, all at once ► the journal ► the agent's exit code
    the keeper ends ► the kernel sends SIGTERM to the agent, which gives back what it has locked
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perseus_agent.clocks.journal import Journal, boot_id
from perseus_agent.devices.base import Device, open_device_set
from perseus_agent.errors import AgentError, DeviceError
from perseus_agent.keeper.alone import only_agent
from perseus_agent.keeper.ledger import Ledger
from perseus_agent.settings import Settings

log = logging.getLogger(__name__)

TICK_S: Final = 0.05
OVERDUE_TICKS: Final = 3
"""Turns of the keeper in which the agent must be overdue: where all processes wait for a processor, the keeper waits
too, and gives the agent as many turns as it gets itself."""
RETRY_S: Final = 0.02
PATIENCE_S: Final = 30.0
"""How long a reset that the driver refuses is tried; what is still locked then is in the journal."""
SPARED: Final = 200
"""By how much likelier the kernel ends the agent than the keeper, in thousandths of the memory."""
_KEPT: Final = "PERSEUS_AGENT_KEPT_BY"
_STOP: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_OOM: Final = Path("/proc/self/oom_score_adj")
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class Kept:
    """What the agent has from its keeper."""

    ledger: Ledger


def kept() -> Kept | None:
    """In the agent: its ledger, once the kernel has promised to end this process with the keeper. None: this process
    was not started by a keeper, and is to be one.
    """
    text = os.environ.pop(_KEPT, "")
    if not text:
        return None
    ledger, keeper, oom = text.split(",")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(keeper):  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    with contextlib.suppress(OSError):
        _OOM.write_text(oom)
    return Kept(Ledger(int(ledger)))


def keep(settings: Settings, arguments: Sequence[str]) -> int:
    """Run an agent with these arguments until it ends; its exit code.

    Raises:
        AgentError: see the class.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, signal.SIGCHLD})
    journal = Path(settings.journal)
    with only_agent(journal, _stopped_within) as lock:
        if lock is None:
            return 0
        oom = _survive_out_of_memory()
        ledger = Ledger.create()
        agent = subprocess.Popen(
            [sys.executable, "-m", "perseus_agent", *arguments],
            pass_fds=(ledger.descriptor, lock),
            env={**os.environ, _KEPT: f"{ledger.descriptor},{os.getpid()},{oom}"},
        )
        gpus = _Gpus(settings.devices)
        _watch(agent, ledger, gpus)
        if owed := ledger.owed():
            began_s = time.monotonic()
            restored = gpus.reset(owed)
            log.warning(
                "the agent ended with %d GPUs locked: %d given back in %.3f s",
                len(owed),
                len(restored),
                time.monotonic() - began_s,
            )
            _write_journal(journal, boot_id(Path(settings.proc_root)), restored)
    return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode


def _watch(agent: subprocess.Popen[bytes], ledger: Ledger, gpus: _Gpus) -> None:
    """Return when the agent has ended, by itself or because it was silent for too long."""
    overdue = 0
    while agent.poll() is None:
        if _stopped_within(TICK_S):
            agent.send_signal(signal.SIGTERM)
        if ledger.serving:
            gpus.open()
        overdue = overdue + 1 if ledger.overdue else 0
        if overdue >= OVERDUE_TICKS:
            log.error("the agent is silent and GPUs are locked: ending it")
            agent.kill()  # first: what does not run cannot lock again
            agent.wait()


class _Gpus:
    """The node's GPUs, opened while all is well: a driver may need seconds for that."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._devices: dict[str, Device] = {}
        self._opening: threading.Thread | None = None

    def open(self) -> None:
        """Open them in the background, once."""
        if self._opening is None:
            self._opening = threading.Thread(target=self._open, name="devices", daemon=True)
            self._opening.start()

    def reset(self, uuids: Iterable[str]) -> list[str]:
        """Reset GPUs, each in a thread of its own, so that one whose driver hangs delays no other. Returns those that
        are back at their default clocks.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        done: list[str] = []
        threads = [threading.Thread(target=self._reset, args=(uuid, deadline_s, done), daemon=True) for uuid in uuids]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return list(done)

    def _reset(self, uuid: str, deadline_s: float, done: list[str]) -> None:
        error: object = "the driver does not show it"
        while time.monotonic() < deadline_s:
            try:
                if uuid in self._opened():
                    self._devices[uuid].reset_clocks()
                    done.append(uuid)
                    return
            except DeviceError as refused:
                error = refused
            time.sleep(RETRY_S)
        log.error("not given back, the journal lists it: %s", error, extra={"gpu": uuid})

    def _opened(self) -> Mapping[str, Device]:
        self.open()
        assert self._opening is not None
        self._opening.join()
        return self._devices

    def _open(self) -> None:
        try:
            devices = open_device_set(self._choice).devices
            self._devices = {device.identity.uuid: device for device in devices}
        except AgentError as error:
            log.error("the keeper cannot open the GPUs: %s", error)


def _write_journal(path: Path, boot: str, restored: Iterable[str]) -> None:
    """After the GPUs are back: so a full disk delays nothing. What is not written is reset once more: harmless."""
    with contextlib.suppress(AgentError):
        journal, _ = Journal.open(path, boot)
        for uuid in restored:
            journal.record_reset(uuid)


def _stopped_within(seconds: float) -> bool:
    """Wait so long, or until a child ends; whether a signal has come that asks to stop."""
    # What it returns is not looked at: after SIGSTOP and SIGCONT, CPython 3.11 returns a signal that never came.
    signal.sigtimedwait({signal.SIGCHLD}, seconds)
    asked = signal.sigpending() & _STOP
    if asked:
        signal.sigwait(asked)
    return bool(asked)


def _survive_out_of_memory() -> str:
    """Let the kernel end the agent before this process when memory is used up; the value that the agent is to take.

    To lower one's own value takes a capability that the container does not have; to raise the agent's takes none.
    """
    try:
        before = int(_OOM.read_text())
    except (OSError, ValueError):
        return "0"
    return str(min(before + SPARED, 1000))

"""Watches one agent, and gives back every GPU that it leaves locked, whatever became of it.

It runs in a container of its own, so that nothing that ends the agent ends it too: no container runtime, no limit of
memory. It reads nothing but the ledger and whether the agent's process has ended: no socket, no file that a pod can
write. It writes nothing but resets and, after these, the journal.

    the agent ends, in whatever way ─┐
    the agent is silent, owes a GPU ─┴► kill it ► reset each owed GPU, all at once ► the journal ► the agent's lock
    a thread of it is still inside the kernel, for a slow disk or driver ► the same once more when it is not
    the keeper ends ► the agent goes on, and shows its ledger to the next keeper (``link``)
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perseus_agent.clocks.journal import Journal, boot_id
from perseus_agent.devices.base import Device, open_device_set
from perseus_agent.errors import AgentError, DeviceError, DriverMismatch, SettingsError
from perseus_agent.keeper.ledger import Ledger
from perseus_agent.keeper.link import check_user, open_socket
from perseus_agent.settings import Settings

log = logging.getLogger(__name__)

TICK_S: Final = 0.05
OVERDUE_TICKS: Final = 3
"""Turns of the keeper in which the agent must be overdue: where all processes wait for a processor, the keeper waits
too, and gives the agent as many turns as it gets itself."""
WATCHED_S: Final = 1.0
"""How long the agent takes a keeper for alive that says nothing."""
MESSAGE_S: Final = 1.0
"""In this time a process that connects must have sent its message."""
RETRY_S: Final = 0.02
OPEN_RETRY_S: Final = 5.0
PATIENCE_S: Final = 30.0
"""How long a reset that the driver refuses is tried; what is still locked then is in the journal."""


def keep(settings: Settings, stop: threading.Event) -> None:
    """Wait for an agent, watch it until it has ended, and give back what it has left locked.

    Args:
        settings: the agent's.
        stop: set it to end the wait. An agent that is watched is watched to its end.

    Raises:
        SettingsError: the socket cannot be made.
    """
    with _listening(Path(settings.keeper_socket)) as listener:
        log.info("waiting for an agent", extra={"socket": settings.keeper_socket})
        while not stop.is_set():
            if not select.select([listener], [], [], TICK_S)[0]:
                continue
            with contextlib.ExitStack() as opened:
                try:
                    agent = _accept(listener, opened)
                except (OSError, ValueError) as error:
                    log.warning("a process was refused: %s", error)
                    continue
                _keep(agent, settings)
                return


@dataclass(frozen=True)
class WatchedAgent:
    """The agent's process, and what it owes."""

    pid: int
    pidfd: int
    """Names the process for good: no signal can reach another that gets its number."""
    ledger: Ledger

    def ended_within(self, seconds: float | None) -> bool:
        """Wait for its end for so many seconds, None: for ever; whether it has ended."""
        return bool(select.select([self.pidfd], [], [], seconds)[0])

    def kill(self) -> None:
        """End it. A thread that is inside the kernel, such as for a slow disk, ends when the kernel is done."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with open_socket() as listener:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a predecessor's
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            raise SettingsError(f"--keeper-socket: cannot listen on {path}: {error}") from error
        yield listener


def _accept(listener: socket.socket, opened: contextlib.ExitStack) -> WatchedAgent:
    """The agent that has connected; ``opened`` gets what must be closed in the end.

    Raises:
        OSError: it is of another user, has ended, or sends nothing.
        ValueError: what it has sent is no ledger.
    """
    connection = opened.enter_context(listener.accept()[0])
    connection.settimeout(MESSAGE_S)
    pid = check_user(connection)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
    for descriptor in descriptors:  # the second, the agent's lock, is only held
        opened.callback(os.close, descriptor)
    if len(descriptors) != 2:
        raise ValueError(f"process {pid} has sent {len(descriptors)} descriptors instead of 2")
    pidfd = os.pidfd_open(pid)
    opened.callback(os.close, pidfd)
    if select.select([connection], [], [], 0)[0]:  # it has ended: its number may be another's by now
        raise ProcessLookupError(f"process {pid} has ended")
    return WatchedAgent(pid, pidfd, Ledger(descriptors[0]))


def _keep(agent: WatchedAgent, settings: Settings) -> None:
    gpus = NodeGpus(settings.devices)
    log.info("watching an agent", extra={"pid": agent.pid})
    watch(agent, gpus.open)
    ended = agent.ended_within(RETRY_S)
    restored = _give_back(agent.ledger.owed(), gpus)
    if not ended:
        # Its GPUs must not wait for the kernel; but the kernel may still do what a thread has asked the driver for.
        log.warning("the agent was ended and is inside the kernel: its GPUs are given back once more when it is not")
        agent.ended_within(None)
        restored = _give_back(agent.ledger.owed(), gpus)
    if restored:
        _write_journal(Path(settings.journal), boot_id(Path(settings.proc_root)), restored)


def _give_back(owed: Sequence[str], gpus: NodeGpus) -> list[str]:
    """Reset GPUs, and say so. Returns those that are back at their default clocks."""
    if not owed:
        log.info("the agent has ended, and no GPU is locked")
        return []
    began_s = time.monotonic()
    restored = gpus.reset(owed)
    took_s = time.monotonic() - began_s
    log.warning("the agent ended with %d GPUs locked: %d given back in %.3f s", len(owed), len(restored), took_s)
    return restored


def watch(agent: WatchedAgent, ready: Callable[[], bool]) -> None:
    """Return when the agent has ended, or was silent for too long and is being ended.

    Args:
        agent: to watch.
        ready: whether its GPUs could be given back now; only then it may count on this keeper.
    """
    overdue = 0
    while not agent.ended_within(TICK_S):
        if ready():
            agent.ledger.watched_for(WATCHED_S)
        overdue = overdue + 1 if agent.ledger.overdue else 0
        if overdue >= OVERDUE_TICKS:
            log.error("the agent is silent and GPUs are locked: ending it", extra={"pid": agent.pid})
            agent.kill()
            return


class NodeGpus:
    """The node's GPUs, opened while all is well: a driver may need seconds for that."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._devices: dict[str, Device] | None = None
        self._opening: threading.Thread | None = None

    def open(self) -> bool:
        """Open them in the background; whether they are open."""
        if self._opening is None:
            self._opening = threading.Thread(target=self._open, name="devices", daemon=True)
            self._opening.start()
        return self._devices is not None

    def reset(self, uuids: Iterable[str]) -> list[str]:
        """Reset GPUs, each in a thread of its own, so that one whose driver hangs delays no other. Returns those that
        are back at their default clocks.
        """
        self.open()
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
                if self._devices and uuid in self._devices:
                    self._devices[uuid].reset_clocks()
                    done.append(uuid)
                    return
            except DriverMismatch as replaced:  # only a new process can: the next agent
                error = replaced
                break
            except DeviceError as refused:
                error = refused
            time.sleep(RETRY_S)
        log.error("not given back, the journal lists it: %s", error, extra={"gpu": uuid})

    def _open(self) -> None:
        while True:
            try:
                devices = open_device_set(self._choice).devices
                self._devices = {device.identity.uuid: device for device in devices}
                return
            except AgentError as error:
                log.warning("the keeper cannot open the GPUs, retrying in %g s: %s", OPEN_RETRY_S, error)
                time.sleep(OPEN_RETRY_S)


def _write_journal(path: Path, boot: str, restored: Iterable[str]) -> None:
    """After the GPUs are back: so a full disk delays nothing. What is not written is reset once more: harmless."""
    with contextlib.suppress(AgentError):
        journal, _ = Journal.open(path, boot)
        for uuid in restored:
            journal.record_reset(uuid)

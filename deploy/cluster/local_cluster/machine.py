"""A machine of the cluster: the namespaces that ``init`` holds, and the processes in them.

Every query reads /proc again and never a file that may be out of date. So `up` after a crash finds what still runs,
and `down` finds what is left. The module knows nothing about Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster import init
from local_cluster.errors import NotUp, StartFailed

_INIT = Path(init.__file__).resolve()
CONTROL_PLANE = "control-plane"
"""Name of the machine that is no node."""
_NAMESPACES = ("mnt", "net", "pid", "uts", "ipc")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEEPER = [
    "sh",
    "-c",
    """
    early=0
    while [ $early -lt 5 ]; do
        began=$(date +%s)
        "$@"
        if [ $(($(date +%s) - began)) -ge 2 ]; then early=0; else early=$((early + 1)); sleep 1; fi
    done
    """,
    "keeper",
]
"""Runs the command that follows it, and starts it again when it ends, as systemd and the kubelet do in other clusters.
A scheduler with an inconsistent cache ends itself, and so does a kubelet before containerd is ready. A command that
ends within two seconds five times in a row has failed and is not started again."""


def default_state() -> Path:
    """Return the default folder of a cluster: PERSEUS_CLUSTER, or a folder below /var/lib."""
    return Path(os.environ.get("PERSEUS_CLUSTER") or "/var/lib/perseus-cluster").resolve()


@dataclass(frozen=True)
class Forward:
    """A port of the outer loopback that leads into the machine."""

    port: int
    host: str
    inner_port: int


@dataclass(frozen=True)
class Machine:
    """One machine; ``state`` is the folder of the whole cluster, which the machine sees at ``init.INSIDE``."""

    state: Path
    name: str

    @property
    def folder(self) -> Path:
        """The machine's files, as a path outside the machine."""
        return self.state / self.name

    @property
    def pid(self) -> int | None:
        """Process 1 of the machine, by its number outside the machine; None if it does not run."""
        return next((pid for pid, name in _inits(self.state) if name == self.name and _is_process_1(pid)), None)

    @property
    def root(self) -> Path:
        """The file system that the machine's processes see, while it runs."""
        return Path(f"/proc/{self.pid}/root")

    def boot(self, forward: Forward | None = None) -> None:
        """Make the machine's namespaces, unless they exist.

        Args:
            forward: a port of the outer loopback to forward into the machine.

        Raises:
            StartFailed: the machine did not start; nothing of it is left.
        """
        if self.pid is not None:
            return
        for folder in ("lib", "log"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", str(_INIT), str(self.state), self.name]
        if forward is not None:
            command += [str(forward.port), forward.host, str(forward.inner_port)]
        with (self.folder / "init.log").open("ab") as log:
            started = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=False
            )
        if started.returncode != 0 or self.pid is None:
            raise StartFailed(f"machine {self.name} did not start:\n{tail(self.folder / 'init.log')}")

    def enter(self, *, network_only: bool = False) -> list[str]:
        """Return the words to put before a command to run it in the machine.

        Args:
            network_only: enter only the network namespace, and keep the outer files and process numbers.

        Raises:
            NotUp: the machine does not run.
        """
        pid = self.pid
        if pid is None:
            raise NotUp(f"{self.name} is not running")
        which = ["--net"] if network_only else ["--mount", "--net", "--pid", "--uts", "--ipc"]
        return ["nsenter", "--target", str(pid), *which, "--"]

    def run(self, *command: str, network_only: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine.

        Args:
            command: the program and its arguments.
            network_only: as for ``enter``.
            options: passed to ``subprocess.run``.

        Returns:
            The completed process with its output.

        Raises:
            NotUp: the machine does not run.
            StartFailed: the command failed, unless ``check=False``.
        """
        options = {"text": True, "capture_output": True, "env": environment(), **options}
        check = options.pop("check", True)
        try:
            return subprocess.run([*self.enter(network_only=network_only), *command], check=check, **options)
        except subprocess.CalledProcessError as failed:
            output = f"{failed.stderr or ''}{failed.stdout or ''}".strip()
            raise StartFailed(f"in {self.name}, `{' '.join(command[:6])}` failed: {output}") from failed

    def spawn(self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        """Start a process that outlives this one and is started again when it ends.

        Args:
            name: its output goes to <name>.log in the machine's folder.
            command: the program and its arguments.
            more: environment variables beside the usual ones.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            subprocess.run(
                [*self.enter(), "setsid", "--fork", *_KEEPER, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), **(more or {})},
                check=True,
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def find(self, program: str) -> list[int]:
        """Return the machine's own processes that run a program, without those of its pods, by their outer numbers."""
        return self._find([program])

    def supervises(self, program: str) -> bool:
        """Return whether a program runs, or will be started again."""
        return bool(self._find([*_KEEPER, program]) or self.find(program))

    def _find(self, beginning: Sequence[str]) -> list[int]:
        pid = self.pid
        if pid is None:
            return []
        home = [_namespace(pid, kind) for kind in _NAMESPACES]
        return [
            each
            for each, arguments in processes()
            if arguments[: len(beginning)] == beginning and [_namespace(each, kind) for kind in _NAMESPACES] == home
        ]

    def signal(self, program: str, number: signal.Signals) -> int:
        """Send a signal to every process that runs a program. After SIGKILL, return only when they have ended.

        A program that is ended in this way is not started again until the next ``spawn``.

        Returns:
            Number of processes that got the signal.
        """
        if number in (signal.SIGKILL, signal.SIGTERM):
            for keeper in self._find([*_KEEPER, program]):
                _kill(keeper, signal.SIGKILL)
        found = self.find(program)
        for pid in found:
            _kill(pid, number)
        if number == signal.SIGKILL:
            wait_until(lambda: not any(running(pid) for pid in found), f"{program} of {self.name} to end", 30)
        return len(found)


def end_all(state: Path) -> None:
    """End every machine of a cluster, with all processes, mounts and interfaces.

    Raises:
        StartFailed: a process is still there after 60 s.
    """
    deadline = time.monotonic() + 60
    while left := [pid for pid, _ in _inits(state) if running(pid)]:
        for pid in left:
            _kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise StartFailed(f"processes {left} have not ended within 60 s")
        time.sleep(0.05)


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield every visible process with its command line; kernel threads and zombies have none and are left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # gone meanwhile
            if line:
                yield int(entry.name), line.rstrip(b"\0").decode(errors="replace").split("\0")


def running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until a condition holds.

    Raises:
        StartFailed: it did not hold within ``timeout_s``; the message names ``what``.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise StartFailed(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.1)


def environment() -> dict[str, str]:
    """Return the environment of a machine's processes, without this process's proxies, home and locale."""
    return {"PATH": PATH, "HOME": "/run", "TMPDIR": "/run", "LANG": "C.UTF-8"}


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _inits(state: Path) -> Iterator[tuple[int, str]]:
    """Yield number and machine name of every ``init`` process of a cluster, running or just starting.

    They may come from another checkout: the folder of the state identifies the cluster, not the path of the program.
    """
    program = f"/{_INIT.parent.name}/{_INIT.name}"
    for pid, arguments in processes():
        if len(arguments) > 5 and arguments[3].endswith(program) and arguments[4] == str(state):
            yield pid, arguments[5]


def _is_process_1(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] == "1"


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, number)

"""Process 1 of a machine: it holds the machine's namespaces (network, mounts, processes, host name, IPC).

usage: init.py STATE NAME [PORT HOST INNER_PORT]

The command returns when the machine is ready; errors are on standard error. The process reaps orphans, and forwards
PORT of the outer loopback to HOST and INNER_PORT inside. It starts no other program. If it ends, the kernel ends every
process of the machine, with all mounts and interfaces; there is no other clean-up. Standard library only, because it
runs with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_PID, _NEW_NET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
INSIDE = Path("/run/cluster")
"""Where STATE is inside the machine, whose own /run and /var/lib hide the outer ones."""


def main() -> int:
    state, name = Path(sys.argv[1]), sys.argv[2]
    outside = _listen(int(sys.argv[3])) if len(sys.argv) > 3 else None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    outer_end, inner_end = os.pipe()
    if os.fork():
        os.close(inner_end)
        return 0 if os.read(outer_end, 1) else 1
    # From here on this is process 1 of the new machine.
    os.setsid()
    os.close(outer_end)
    _set_up(state, name)
    if outside is not None:
        if os.fork() == 0:
            _forward(outside, (sys.argv[4], int(sys.argv[5])))
        outside.close()
    os.write(inner_end, b".")
    os.close(inner_end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _set_up(state: Path, name: str) -> None:
    """Mount the machine's own folders, set its host name, and enable its loopback and forwarding."""

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)  # noqa: S607 - of util-linux

    opened = os.open(state, os.O_PATH)  # the mount of /run below may hide it
    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    INSIDE.mkdir()
    with contextlib.suppress(FileExistsError):
        Path("/run/lock").mkdir(mode=0o1777)
    subprocess.run(
        ["mount", "--bind", f"/proc/self/fd/{opened}", str(INSIDE)],  # noqa: S607
        check=True,
        pass_fds=[opened],
    )
    os.close(opened)
    for folder in ("lib", "log"):
        mount("--bind", str(INSIDE / name / folder), f"/var/{folder}")
    mount("--make-rshared", "/")  # for volumes that pods mount for their node
    socket.sethostname(name)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # noqa: S607
    for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            Path("/proc/sys/net", switch).write_text("1", encoding="ascii")


def _listen(port: int) -> socket.socket:
    """Return a socket that accepts connections on the outer loopback: a socket stays in the network that made it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _forward(listener: socket.socket, address: tuple[str, int]) -> None:
    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(address, timeout=10)
            except OSError:
                return  # the client sees its connection closed
            with server:
                server.settimeout(None)
                answers = threading.Thread(target=copy, args=(server, client), daemon=True)
                answers.start()
                copy(client, server)
                answers.join()

    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve, args=(client,), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())

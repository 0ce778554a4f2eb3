"""The Unix socket of training processes and serving engines: connections, hellos, and the moment a process ends.

One thread accepts connections, reads the pod of each from the kernel, and notices ends, of connections and processes.
A hello is read in a short-lived thread, since a peer may be slow on purpose, and only if its pod has room for it in
``node.budgets``: nothing that a process sends is read before its pod is known. After the welcome nothing is read from
the socket any more: the worker of the rank's GPU reads its shared memory. The node decides which process may be a rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from perseus_agent.errors import PeerRefused, SettingsError
from perseus_agent.node.budgets import Budgets, ConnectionUse, OverBudget, Refusals
from perseus_agent.node.node import Node
from perseus_agent.node.processes import ServingSession, Session, TrainingSession
from perseus_agent.pods.identity import Peer, identify_peer, peer_pid
from perseus_agent.servers.quiet_log import Quiet
from perseus_proto.channel import ChannelReader
from perseus_proto.engine_channel import EngineReader
from perseus_proto.engine_hello import EngineHello, receive_any_hello
from perseus_proto.frames import ChannelError, VersionMismatch
from perseus_proto.hello import Hello, Reason, encode_refusal, send_welcome

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 2.0
ACCEPT_PAUSE_S: Final = 0.1
"""After an accept that failed for want of descriptors or memory: the next would fail as well."""
REST: Final = 4.0
"""How many times as long as it has worked the accepting thread rests. However often processes connect, it takes a fifth
of a processor at most: the threads that set clocks need the same interpreter.
"""
MESSAGES: Final = 20
MESSAGES_EVERY_S: Final = 10.0
"""Log messages that peers can cause, in so many seconds."""
_PASSING: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.ECONNABORTED})
"""Errors of accept that say something about one connection only."""
_GONE: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class LocalServer:
    """The listening socket and the connections."""

    def __init__(self, path: str, node: Node, proc_root: Path, *, selinux_label: str = "") -> None:
        """Bind the socket.

        Args:
            path: of the socket.
            node: decides which process may drive which GPUs.
            proc_root: where the host's /proc is.
            selinux_label: of the socket and its directory; empty: whatever they get.

        Raises:
            SettingsError: the path cannot be used.
        """
        self._path = Path(path)
        self._node = node
        self._proc_root = proc_root
        self._lock = threading.Lock()
        self._budgets = Budgets(node.is_leased, time.monotonic)
        self._refusals = Refusals(time.monotonic)
        self._budgets_lock = threading.Lock()
        self._quiet = Quiet(log, MESSAGES, MESSAGES_EVERY_S)
        self._resume_s = 0.0  # when to accept again; 0: the listener is watched
        self._connections: dict[int, tuple[socket.socket, Session, ConnectionUse]] = {}
        self._pidfds: dict[int, int] = {}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # accepted connections inherit it
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and not stat.S_ISSOCK(self._path.stat().st_mode):
                raise SettingsError(f"--socket: {path} exists and is not a socket")
            self._path.unlink(missing_ok=True)  # a predecessor's; the journal's lock shows that it is dead
            self._listener.bind(path)
            if selinux_label:
                _set_label(selinux_label, self._path.parent, self._path)
            self._path.chmod(0o666)  # training runs as any user; the kernel names each process
            self._listener.listen(128)
        except SettingsError:
            self._listener.close()
            raise
        except OSError as error:
            self._listener.close()
            raise SettingsError(f"--socket: cannot listen on {path}: {error}") from error
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="local-socket", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more connections and close all."""
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            began_s = time.thread_time()
            for descriptor, _ in self._epoll.poll(ACCEPT_PAUSE_S if self._resume_s else None):
                if descriptor == self._bell:
                    stopping = True
                elif descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._end(self._pidfds.get(descriptor, descriptor))
            if 0 < self._resume_s <= time.monotonic():
                self._resume_s = 0.0
                self._epoll.register(self._listener, select.EPOLLIN)
            time.sleep(REST * (time.thread_time() - began_s))
        self._listener.close()
        for descriptor in list(self._connections):
            self._end(descriptor)
        self._epoll.close()
        os.close(self._bell)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in _PASSING:
                self._quiet.warning("accept failed, pausing: %s", error)
                self._epoll.unregister(self._listener)
                self._resume_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        peer: Peer | None = None
        try:
            with self._budgets_lock:
                exhausted = self._refusals.exhausted(peer_pid(connection))
            if exhausted:
                self._node.count_refusal()
                connection.close()
                return
            peer = identify_peer(connection, self._proc_root)
            with self._budgets_lock:
                use = self._budgets.begin(peer.process.pod_uid, lambda: _hang_up(connection))
            threading.Thread(target=self._greet, args=(connection, peer, use), name="hello", daemon=True).start()
        except (PeerRefused, OverBudget) as error:
            self._refuse(connection, peer, getattr(error, "reason", Reason.BUSY), str(error))
            with self._budgets_lock:
                self._refusals.add(peer_pid(connection))
            self._drop(connection, peer)
        except Exception:  # no thread, or no descriptor, can be had now
            log.exception("a connection could not be served")
            self._drop(connection, peer)

    def _drop(self, connection: socket.socket, peer: Peer | None) -> None:
        connection.close()
        if peer is not None and peer.pidfd is not None:
            os.close(peer.pidfd)

    def _greet(self, connection: socket.socket, peer: Peer, use: ConnectionUse) -> None:
        try:
            session = self._admit(connection, peer, use)
        except Exception:
            log.exception("hello failed")
            session = None
        with self._budgets_lock:
            self._budgets.welcomed(use)
            if session is None:
                self._budgets.end(use)
                self._refusals.add(peer.pid)
        if session is None:
            self._drop(connection, peer)
            return
        with self._lock:
            try:
                self._connections[connection.fileno()] = connection, session, use
                self._epoll.register(connection, _GONE)
                if session.peer.pidfd is not None:
                    self._pidfds[session.peer.pidfd] = connection.fileno()
                    self._epoll.register(session.peer.pidfd, select.EPOLLIN)
            except (OSError, ValueError):  # the server has stopped since
                self._forget(connection.fileno())

    def _reserve(self, use: ConnectionUse, size: int) -> None:
        """Make room for a hello before it is read."""
        with self._budgets_lock:
            displaced = self._budgets.reserve(use, size)
        for other in displaced:
            self._quiet.warning("processes of pod %s make room for others", other.pod_uid)
            other.displace()

    def _admit(self, connection: socket.socket, peer: Peer, use: ConnectionUse) -> Session | None:
        """Read a hello and answer it. None: the process was refused, or went away."""
        admitted: Session | None = None
        try:
            hello = receive_any_hello(connection, HELLO_TIMEOUT_S, peer.pid, lambda size: self._reserve(use, size))
            session = _session(peer, hello, lambda: _hang_up(connection))
            channel = session.channel
            try:
                self._node.admit(session)
            except BaseException:
                channel.close()
                raise
            admitted = session
            instructions = len(hello.schedule) if isinstance(hello, Hello) else 0
            send_welcome(connection, instructions, channel.memory_fd, channel.event_fd)
        except PeerRefused as error:
            self._refuse(connection, peer, error.reason, str(error))
        except OverBudget as error:
            self._refuse(connection, peer, Reason.BUSY, str(error))
        except VersionMismatch as error:
            self._refuse(connection, peer, Reason.VERSION, str(error))
        except ChannelError as error:
            self._refuse(connection, peer, Reason.MALFORMED, str(error))
        except OSError as error:
            self._quiet.info("a peer went away during its hello: %s", error)
        else:
            self._quiet.info("a process sent its hello", extra={"pod": session.pod_uid, "pid": peer.pid})
            return session
        if admitted is not None:
            self._node.leave(admitted)
        return None

    def _refuse(self, connection: socket.socket, peer: Peer | None, reason: Reason, message: str) -> None:
        who = {"pod": peer.process.pod_uid, "pid": peer.pid} if peer else {}
        self._quiet.warning("a process was refused: %s", message, extra=who)
        self._node.count_refusal()
        with contextlib.suppress(OSError):
            connection.setblocking(False)  # its buffer is empty: a peer that has filled it does not read the answer
            connection.sendall(encode_refusal(reason, message))

    def _end(self, descriptor: int) -> None:
        with self._lock:
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        entry = self._connections.pop(descriptor, None)
        if entry is None:
            return
        connection, session, use = entry
        with self._budgets_lock:
            self._budgets.end(use)
        pidfd = session.peer.pidfd
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(connection)
        if pidfd is not None:
            self._pidfds.pop(pidfd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(pidfd)
            os.close(pidfd)
        connection.close()
        self._node.leave(session)


def _session(peer: Peer, hello: Hello | EngineHello, hang_up: Callable[[], None]) -> Session:
    if isinstance(hello, EngineHello):
        return ServingSession(peer, hello, EngineReader.create(), hang_up)
    return TrainingSession(peer, hello, ChannelReader.create(len(hello.schedule)), hang_up)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _set_label(label: str, *paths: Path) -> None:
    """Give files a label of SELinux, as chcon does.

    Raises:
        SettingsError: the file system or the node's policy refuses it.
    """
    for path in paths:
        try:
            os.setxattr(path, "security.selinux", label.encode() + b"\0")
        except OSError as error:
            raise SettingsError(f"--socket-selinux-label: cannot label {path} as {label}: {error}") from error

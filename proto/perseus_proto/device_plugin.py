"""Offering an extended resource to the kubelet: the service that the kubelet calls, and its registration.

The kubelet forgets a plugin whenever it starts, and empties its folder of plugins. So the loop compares two files all
the time, the plugin's socket and the kubelet's, and begins again if either is not the one with which it registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_proto.deviceplugin import deviceplugin_pb2_grpc as stubs

CHECK_S: Final = 1.0
UNWATCHED_S: Final = 10.0
"""A kubelet that registers a plugin asks it for its list at once; one that has not by then has dropped it."""
_CALL_TIMEOUT_S: Final = 5.0
_THREADS: Final = 4
"""One for the list that the kubelet watches, one for that of the kubelet before it, the others for calls."""


class Refused(Exception):
    """A container may not get what it requests; the message, one line, is shown as that of its pod."""


class DevicePlugin(stubs.DevicePluginServicer):
    """The service that the kubelet calls. All devices are healthy as long as the plugin serves."""

    def __init__(self, names: Sequence[str], grant: Callable[[Sequence[str]], messages.ContainerAllocateResponse]):
        """Offer devices.

        Args:
            names: of the devices.
            grant: what a container gets with devices of these names; it may raise ``Refused``.
        """
        self._names = tuple(names)
        self._grant = grant
        self._stopped = threading.Event()
        self._watching = 0
        self._lock = threading.Lock()

    @property
    def watched(self) -> bool:
        """Whether a kubelet watches the list of devices."""
        return self._watching > 0

    def stop(self) -> None:
        """End the lists that kubelets watch."""
        self._stopped.set()

    def GetDevicePluginOptions(self, request: Any, context: Any) -> messages.DevicePluginOptions:  # noqa: N802, ARG002
        """None are used."""
        return messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[messages.ListAndWatchResponse]:  # noqa: N802, ARG002
        """All of them, healthy; the stream must stay open, or the kubelet takes the devices for gone."""
        with self._lock:
            self._watching += 1
        try:
            yield messages.ListAndWatchResponse(
                devices=[messages.Device(ID=name, health="Healthy") for name in self._names]
            )
            while context.is_active() and not self._stopped.wait(CHECK_S):
                pass
        finally:
            with self._lock:
                self._watching -= 1

    def Allocate(self, request: messages.AllocateRequest, context: Any) -> messages.AllocateResponse:  # noqa: N802
        """What each container gets."""
        try:
            return messages.AllocateResponse(
                container_responses=[self._grant(wanted.devices_ids) for wanted in request.container_requests]
            )
        except Refused as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from error


@dataclass(frozen=True)
class Offer:
    """An extended resource that a plugin offers to the node's kubelet."""

    kubelet: Path
    """The kubelet's folder of device plugins."""
    endpoint: str
    """File name of the plugin's socket in it."""
    resource: str
    make: Callable[[], DevicePlugin]
    """Makes the service, once for each registration."""
    report: Callable[[str, bool], None]
    """Called with one line whenever the state changes, and whether the resource is offered now."""
    beat: Callable[[], None] = lambda: None
    """Called as long as the kubelet has the present list."""

    def run(self, stop: threading.Event) -> None:
        """Serve and register, again after every restart of the kubelet, until ``stop`` is set. Never raises for a
        kubelet that is absent, refuses, or comes and goes: it tries again.
        """
        reported = ""

        def say(line: str, offered: bool) -> None:
            nonlocal reported
            if line != reported:
                reported = line
                self.report(line, offered)

        while not stop.is_set():
            if self.kubelet.is_dir():
                problem = self._serve(stop, lambda: say(f"offered as {self.resource}", True))
            else:
                problem = f"there is no folder {self.kubelet}"
            if problem:
                say(f"{self.resource} is not offered, trying again: {problem}", False)
                stop.wait(CHECK_S)

    def _serve(self, stop: threading.Event, offered: Callable[[], None]) -> str:
        """Return why the resource could not be offered; empty: it was, and has to be offered again."""
        socket_path, theirs, plugin = self.kubelet / self.endpoint, self.kubelet / "kubelet.sock", self.make()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="device-plugin") as threads:
            server = grpc.server(threads)
            stubs.add_DevicePluginServicer_to_server(plugin, server)
            try:
                socket_path.unlink(missing_ok=True)
                server.add_insecure_port(f"unix:{socket_path}")
                server.start()
                before = (
                    _file(socket_path),
                    _file(theirs),
                )  # before it registers: a kubelet that starts meanwhile is another
                if problem := _register(theirs, self.endpoint, self.resource):
                    return problem
                offered()
                unwatched_s = 0.0
                while not stop.wait(CHECK_S):
                    unwatched_s = 0.0 if plugin.watched else unwatched_s + CHECK_S
                    now = _file(socket_path), _file(theirs)
                    if now[0] != before[0] or now[1] not in (before[1], None) or unwatched_s >= UNWATCHED_S:
                        break
                    self.beat()
            except (OSError, RuntimeError) as error:
                return f"{socket_path}: {error}"
            finally:
                plugin.stop()
                server.stop(0).wait()
        return ""


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is at a path; None: there is none. The time tells files apart that got the same inode."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _register(kubelet: Path, endpoint: str, resource: str) -> str:
    """Return why the kubelet did not register the plugin; empty: it did."""
    request = messages.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=resource)
    with grpc.insecure_channel(f"unix:{kubelet}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            stubs.RegistrationStub(channel).Register(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else error
            return f"the kubelet did not register it: {details}"
    return ""

"""The kubelet's side of device plugins: it restarts, refuses, hangs, and calls back who registers."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from tests.waiting import PATIENCE_S

from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_proto.deviceplugin import deviceplugin_pb2_grpc as stubs


class PluginRegistry(stubs.RegistrationServicer):
    """The kubelet's side: at every start it empties its folder, and it calls back the plugin that registers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refusal = ""
        self.dials = True
        self.registered: queue.Queue[messages.RegisterRequest] = queue.Queue()
        self.lists: queue.Queue[dict[str, str]] = queue.Queue()
        self._endpoint = ""
        self._server: Any = None
        self._stopped = threading.Event()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.iterdir():
            left.unlink()
        self._stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        stubs.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        self._server.start()

    def stop(self, *, hangs: bool = False) -> None:
        """Go away, if it runs; a kubelet that hangs goes on to watch the plugin, while another has its place."""
        if not hangs:
            self._stopped.set()
        if self._server:
            self._server.stop(0).wait()

    def Register(self, request: messages.RegisterRequest, context: Any) -> messages.Empty:
        self._endpoint = request.endpoint
        if self.refusal:
            self.registered.put(request)
            context.abort(grpc.StatusCode.UNKNOWN, self.refusal)
        if self.dials:
            threading.Thread(target=self._watch, args=(request.endpoint, self._stopped), daemon=True).start()
        self.registered.put(request)
        return messages.Empty()

    def _watch(self, endpoint: str, stopped: threading.Event) -> None:
        with grpc.insecure_channel(f"unix:{self.folder / endpoint}") as channel:
            stream = stubs.DevicePluginStub(channel).ListAndWatch(messages.Empty())
            threading.Thread(target=lambda: stopped.wait() and stream.cancel(), daemon=True).start()
            try:
                for answer in stream:
                    self.lists.put({device.ID: device.health for device in answer.devices})
            except grpc.RpcError:
                pass

    def allocate(self, *names: str) -> messages.ContainerAllocateResponse:
        """What the plugin that registered last gives a container with these devices."""
        with grpc.insecure_channel(f"unix:{self.folder / self._endpoint}") as channel:
            wanted = messages.ContainerAllocateRequest(devices_ids=names)
            request = messages.AllocateRequest(container_requests=[wanted])
            answer: messages.AllocateResponse = stubs.DevicePluginStub(channel).Allocate(request, timeout=PATIENCE_S)
        return answer.container_responses[0]

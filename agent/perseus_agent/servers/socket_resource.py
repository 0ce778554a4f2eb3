"""The agent's socket as an extended resource of the node, for pods that may mount no hostPath.

A container that requests one ``perseus.energy/agent`` gets the socket's directory, read-only, and the variable that
names the socket. Who it is and which GPUs it may drive is decided as for every other process that connects. The mount
is the directory itself: one that was removed and made anew would be lost to the containers that run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perseus_core import keys
from perseus_proto.device_plugin import DevicePlugin, Offer, Refused
from perseus_proto.deviceplugin import deviceplugin_pb2 as messages

log = logging.getLogger(__name__)

ENDPOINT: Final = "perseus-agent.sock"
COUNT: Final = 10_000
"""Number on each node: far more than the containers of a node (110 pods by default), and few enough for the kubelet,
which stores nine bytes for each. A container gets one only, so to take them all takes as many containers.
"""


class SocketResource:
    """Offers the socket to the node's kubelet, from a thread of its own."""

    def __init__(self, kubelet: Path, socket: Path) -> None:
        """Does not offer it yet.

        Args:
            kubelet: the kubelet's directory of device plugins; it need not exist.
            socket: the agent's socket, with the same path on the node, here and in the container.
        """
        self._kubelet = kubelet
        self._socket = socket
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="socket-resource", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Offer it no more. Pods that run keep their mount; new ones wait for the next agent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        names = [f"agent-{number}" for number in range(COUNT)]
        Offer(
            self._kubelet,
            ENDPOINT,
            keys.RESOURCE_AGENT,
            lambda: DevicePlugin(names, self._grant),
            report=lambda line, offered: log.log(logging.INFO if offered else logging.WARNING, "%s", line),
        ).run(self._stop)

    def _grant(self, names: Sequence[str]) -> messages.ContainerAllocateResponse:
        if len(names) > 1:  # or one container could take them all
            raise Refused(f"{keys.RESOURCE_AGENT}: a container may request 1, not {len(names)}")
        directory = str(self._socket.parent)
        return messages.ContainerAllocateResponse(
            envs={keys.ENV_SOCKET: str(self._socket)},
            mounts=[messages.Mount(container_path=directory, host_path=directory, read_only=True)],
        )

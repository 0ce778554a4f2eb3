"""Start and stop of the agent: open everything, serve, and on SIGTERM restore all clocks before the process ends.

The order matters: first the lock that makes this the only agent of the node, then the journal, then devices, then the
resets that the journal lists, then the sockets. Stopping is the reverse, and takes at most ``--drain-timeout-s``,
whatever hangs. Apart from the gRPC service this is the only module that imports grpc for serving.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc

from perseus_agent import garbage
from perseus_agent.clocks.governor import GovernorLimits
from perseus_agent.clocks.gpu_worker import WorkerLimits
from perseus_agent.clocks.journal import Journal, boot_id
from perseus_agent.clocks.telemetry import MAX_WATCHERS, TelemetryHub
from perseus_agent.devices.base import Controllability, Device, DeviceSet, open_device_set
from perseus_agent.errors import DeviceError, DriverMismatch, DriverUnavailable, SettingsError
from perseus_agent.keeper.alone import only_agent
from perseus_agent.keeper.ledger import Ledger
from perseus_agent.keeper.link import KeeperLink
from perseus_agent.node.node import Node
from perseus_agent.node.pages import PageLink
from perseus_agent.pods.gpu_names import GpuNames
from perseus_agent.pods.pod_resources import PodResources
from perseus_agent.preflight import preflight
from perseus_agent.servers.grpc_service import MAX_SELECTORS, AgentService
from perseus_agent.servers.local_socket import LocalServer
from perseus_agent.servers.metrics import MetricsServer
from perseus_agent.servers.socket_resource import SocketResource
from perseus_agent.settings import Settings
from perseus_core.units import s_from_ms, s_from_us
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_runtime.ready_file import write_ready_file
from perseus_runtime.tls import CONNECTION_AGE, server_credentials

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest plan set on the wire; one of 64 stages of 3,072 instructions takes a few MiB."""
COMMAND_THREADS: Final = 8
DRIVER_RETRY_S: Final = 5.0
CHECK_S: Final = 0.5
"""How often it is looked whether the process must leave by itself."""
STUCK: Final = 4
"""Exit code of an agent one of whose threads does not come to an end."""
SILENT_S: Final = 0.75
"""How long the thread that ends leases may be silent before the keeper ends the agent, if it has locked GPUs."""
DRAIN_GRACE_S: Final = 5.0


class Server:
    """One running agent."""

    def __init__(self, settings: Settings, devices: DeviceSet, journal: Journal, ledger: Ledger) -> None:
        limits = WorkerLimits(
            governor=GovernorLimits(s_from_us(settings.min_switch_interval_us), s_from_ms(settings.settle_ms)),
            sample_interval_s=s_from_ms(settings.sample_interval_ms),
            watch_interval_s=s_from_ms(settings.watch_interval_ms),
            hang_timeout_s=settings.hang_timeout_s,
            idle_loss=settings.idle_loss,
        )
        self._settings = settings
        self._devices = devices
        self._ledger = ledger
        names = GpuNames.of_node(device.identity for device in devices.devices)
        self._kubelet = PodResources(settings.pod_resources_socket, names=names)
        self._hub = TelemetryHub(settings.telemetry_events)
        self.node = Node(devices, journal, self._kubelet, self._hub, limits, kept=lambda: ledger.alive_for(SILENT_S))
        self._serving = False
        self._local = LocalServer(
            settings.socket, self.node, Path(settings.proc_root), selinux_label=settings.socket_selinux_label
        )
        self._pages = PageLink(settings.reader_socket, self.node)
        self._resource = (
            SocketResource(Path(settings.device_plugins), Path(settings.socket)) if settings.device_plugins else None
        )
        self._grpc, self.grpc_port = _grpc_server(settings, self.node)
        self._metrics = (
            MetricsServer(
                settings.metrics_address,
                self.node,
                self._hub,
                lambda: self._serving,
                settings.node_name or socket.gethostname(),
                per_gpu=settings.gpu_metrics,
            )
            if settings.metrics_address
            else None
        )

    def start(self) -> None:
        """Reset the GPUs that the journal lists, then serve."""
        self.node.start()
        self._local.start()
        self._pages.start()
        if self._resource:
            self._resource.start()
        self._grpc.start()
        self._serving = True
        settings = self._settings
        addresses = {
            "grpc": _bound(settings.grpc_address, self.grpc_port),
            "metrics": _bound(settings.metrics_address, self._metrics.port) if self._metrics else "",
            "socket": settings.socket,
        }
        write_ready_file(settings.ready_file, addresses)
        log.info("serving", extra=addresses)

    def stop(self) -> bool:
        """Reset every GPU and stop. False: some GPU could not be reset in time; the journal lists it."""
        self._serving = False
        # The thread that says so ends with the drain; the keeper gives back what is not given back by then.
        self._ledger.alive_for(self._settings.drain_timeout_s + DRAIN_GRACE_S)
        owed = self.node.drain(self._settings.drain_timeout_s)
        for uuid in owed:
            log.error("clocks not restored in time; the journal remembers", extra={"gpu": uuid})
        if self._resource:
            self._resource.stop()
        self._local.stop()
        self._pages.stop()
        self._grpc.stop(0.5).wait()
        if self._metrics:
            self._metrics.close()
        self._kubelet.close()
        if not owed:  # a driver in which a call hangs is not shut down: that would hang too
            self._devices.close()
        log.info("stopped")
        return not owed


def run(settings: Settings, stop: threading.Event) -> int:
    """Serve until ``stop`` is set; the exit code.

    Raises:
        SettingsError: a setting is wrong, or the node is not as it names it.
        AgentError: see the class.
    """
    findings = preflight(settings)
    for finding in findings:
        log.log(logging.ERROR if finding.fatal else logging.WARNING, "preflight: %s", finding.message)
    if any(finding.fatal for finding in findings):
        return 2
    with only_agent(Path(settings.journal), stop.wait) as lock:
        if lock is None:
            return 0
        ledger = Ledger.create()
        KeeperLink(settings.keeper_socket, ledger, lock).start()
        return _serve(settings, stop, ledger)


def _serve(settings: Settings, stop: threading.Event, ledger: Ledger) -> int:
    journal, damage = Journal.open(Path(settings.journal), boot_id(Path(settings.proc_root)), ledger)
    devices = _open_devices(settings.devices, stop)
    if devices is None:
        return 0
    if damage:
        log.error("%s: which GPUs an earlier agent had locked is not known: resetting all that may be driven", damage)
        journal.presume_locked(device.identity.uuid for device in devices.devices if _drivable(device))
    server = Server(settings, devices, journal, ledger)
    server.start()
    garbage.begin()
    collected_s = time.monotonic()
    while not stop.wait(CHECK_S) and not (server.node.driver_replaced or server.node.stuck):
        if time.monotonic() - collected_s > garbage.INTERVAL_S:
            garbage.collect(idle=not (server.node.ranks() or server.node.engines()))
            collected_s = time.monotonic()
    given_back = server.stop()
    if server.node.stuck:
        return STUCK
    if server.node.driver_replaced:
        raise DriverMismatch("the GPU driver was replaced since the agent started; start the agent again")
    return 0 if given_back else 1


def _drivable(device: Device) -> bool:
    try:
        return device.controllability()[0] is Controllability.YES
    except DeviceError:
        return True  # not known: the reset is tried until the GPU answers


def _open_devices(choice: str, stop: threading.Event) -> DeviceSet | None:
    """Open the node's GPUs, however long the driver takes to come up; None: the agent was stopped before."""
    while True:
        try:
            return open_device_set(choice)
        except DriverMismatch:
            raise
        except DriverUnavailable as error:
            log.warning("no driver yet, retrying in %g s: %s", DRIVER_RETRY_S, error)
            if stop.wait(DRIVER_RETRY_S):
                return None
        except DeviceError as error:
            raise SettingsError(f"--devices: {error}") from error


def _grpc_server(settings: Settings, node: Node) -> tuple[grpc.Server, int]:
    server = grpc.server(
        ThreadPoolExecutor(COMMAND_THREADS + MAX_WATCHERS + MAX_SELECTORS, thread_name_prefix="grpc"),
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            CONNECTION_AGE,
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    allowed = None if settings.insecure else settings.allowed_sans
    node_name = settings.node_name or socket.gethostname()
    stubs.add_AgentServicer_to_server(AgentService(node, node_name, allowed), server)
    try:
        if settings.insecure:
            return server, server.add_insecure_port(settings.grpc_address)
        credentials = server_credentials(key=settings.tls_key, cert=settings.tls_cert, ca=settings.tls_ca)
        return server, server.add_secure_port(settings.grpc_address, credentials)
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingsError(f"--grpc-address: cannot serve on {settings.grpc_address}: {error}") from error


def _bound(address: str, port: int) -> str:
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

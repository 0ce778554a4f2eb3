"""``perseus-operator``: reads settings, sets up logging, draws an epoch, and runs kopf until it is stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import uuid
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from perseus_operator import handlers
from perseus_operator.clients.agents import AgentPool, Credentials
from perseus_operator.clients.kube import KubeClient
from perseus_operator.clients.lease_client import EPOCH_LEASE, LeaseClient
from perseus_operator.controller.epochs import Epochs
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.services import Services
from perseus_operator.controller.shards import Replica
from perseus_operator.controller.tracing import export_to, log_fields
from perseus_operator.controller.view import JobView
from perseus_operator.errors import KubeError
from perseus_operator.objects import JobRef, User
from perseus_operator.planning.shards import identity_of
from perseus_operator.reporting.metrics import Metrics, MetricsServer
from perseus_operator.servers.grpc_service import OperatorService, RpcServer
from perseus_operator.servers.web.access import Access
from perseus_operator.servers.web.server import WebServer
from perseus_operator.settings import Settings, settings_or_exit
from perseus_operator.solving.memory import container_limit_mib, worker_memory_mib
from perseus_operator.solving.pool import RESTORES, SolverPool
from perseus_proto.addresses import on_loopback
from perseus_proto.http_server import Certificate
from perseus_proto.logs import JsonFormatter

logger = logging.getLogger("perseus_operator")

_PAGE_TIMEOUT_S: Final = 5.0
T = TypeVar("T")


def job_field(record: logging.LogRecord) -> dict[str, str]:
    """The PerseusJob that a log record is about: its first argument, where that is a JobRef; and the trace, if any."""
    if record.args and isinstance(record.args, tuple) and isinstance(record.args[0], JobRef):
        return {"job": str(record.args[0]), **log_fields()}
    return log_fields()


class Process:
    """Everything that lives as long as the process: created when kopf starts, closed when it stops."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        self._settings = settings
        self._epoch = epoch
        self._metrics = Metrics()
        self._operator: Operator | None = None
        self._server: MetricsServer | None = None
        self._web: WebServer | None = None
        self._rpc: RpcServer | None = None
        self._leases: LeaseClient | None = None

    async def start(self) -> Operator:
        """Start the operator and its servers."""
        settings, epoch = self._settings, self._epoch
        kube = await KubeClient.connect()
        leases = self._leases = await LeaseClient.connect_to(settings.agent_namespace)
        identity = identity_of(settings.replica or socket.gethostname(), uuid.uuid4().hex[:8])
        credentials = (
            None
            if settings.insecure
            else Credentials(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_server_name)
        )
        services = Services(
            kube=kube,
            agents=AgentPool(credentials, timeout_s=settings.agent_timeout_s),
            solver=SolverPool(
                workers=settings.solve_workers,
                timeout_s=settings.solve_timeout_s,
                memory_mib=worker_memory_mib(
                    settings.solve_memory_mib,
                    processes=settings.solve_workers + RESTORES,
                    limit_mib=container_limit_mib(),
                ),
            ),
            metrics=self._metrics,
            epochs=Epochs(leases, identity),
            limits=settings.limits,
            namespaces=settings.namespace_list,
            status_interval_s=settings.status_interval_s,
            release_timeout_s=settings.release_timeout_s,
        )
        operator = Operator(settings, kube, services, Replica(leases, identity, epoch))
        await operator.start()
        self._operator = operator
        if settings.metrics_address:
            self._server = MetricsServer(
                settings.metrics_address, self._metrics, healthy=operator.unhealthy, ready=lambda: True
            )
        self._web = _web_server(settings, operator, kube)
        self._rpc = await _rpc_server(settings, credentials, operator)
        serving = {"metrics": self._server, "web": self._web, "rpc": self._rpc}
        addresses = {name: server.address if server else "" for name, server in serving.items()}
        logger.info(
            "serving with epoch %d: %s", epoch, ", ".join(f"{k} on {v or 'none'}" for k, v in addresses.items())
        )
        if settings.ready_file:
            temporary = Path(settings.ready_file + ".new")  # a reader that waits for the file must find it whole
            temporary.write_text(json.dumps({"epoch": epoch, **addresses}))
            temporary.replace(settings.ready_file)
        return operator

    async def stop(self) -> None:
        """Stop the servers and the operator. The agents' leases stay, for the replica that takes over."""
        if self._rpc is not None:
            await self._rpc.close()
        for server in (self._web, self._server):
            if server is not None:
                await asyncio.to_thread(server.close)
        if self._operator is not None:
            await self._operator.close()
        if self._leases is not None:
            await self._leases.close()


class _Reviews:
    """Asks the API server in the event loop, for the threads of the page."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._loop = asyncio.get_running_loop()

    def user_of(self, token: str) -> User | None:
        return self._answer(self._kube.user_of(token))

    def may_get_jobs(self, user: User, namespace: str) -> bool:
        return self._answer(self._kube.may_get_jobs(user, namespace))

    def _answer(self, question: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(timeout=_PAGE_TIMEOUT_S)


def _web_server(settings: Settings, operator: Operator, kube: KubeClient) -> WebServer | None:
    """Serve the page. An address that is in use is logged; it must not stop the operator."""
    loop, address = asyncio.get_running_loop(), settings.web_address

    def views() -> list[JobView]:
        return asyncio.run_coroutine_threadsafe(operator.views(), loop).result(timeout=_PAGE_TIMEOUT_S)

    try:
        if not address:
            return None
        if on_loopback(address):
            return WebServer(address, views)
        certificate = Certificate(settings.web_cert, settings.web_key)
        return WebServer(address, views, Access(_Reviews(kube)), certificate)
    except OSError as error:
        logger.warning("the web page is not served: --web-address %s: %s", address, error)
        return None


async def _rpc_server(settings: Settings, credentials: Credentials | None, operator: Operator) -> RpcServer | None:
    """Serve set_straggler. An address that is in use is logged; it must not stop the operator, whose telemetry shows
    stragglers too.
    """
    if not settings.rpc_address or credentials is None:
        return None
    try:
        service = OperatorService(operator.declare_straggler, settings.rpc_allowed_sans)
        credentials = replace(credentials, ca=settings.rpc_ca or credentials.ca)
        return await RpcServer.start(settings.rpc_address, credentials, service)
    except OSError as error:
        logger.error("set_straggler is not served: --rpc-address %s: %s", settings.rpc_address, error)
        return None


async def _draw_epoch(namespace: str) -> int:
    leases = await LeaseClient.connect_to(namespace)
    try:
        return await leases.next_epoch()
    finally:
        await leases.close()


def main() -> None:
    """Run the operator; the entry point of ``perseus-operator``."""
    settings = settings_or_exit(sys.argv[1:], os.environ)
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter(job_field))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level, handlers=[handler])
    try:
        epoch = asyncio.run(_draw_epoch(settings.agent_namespace))
    except KubeError as error:
        # A wrong namespace, missing rights or no API server: one line in the log, and Kubernetes restarts the pod.
        logger.error("cannot start: Lease %s/%s: %s", settings.agent_namespace, EPOCH_LEASE, error)
        sys.exit(1)
    end_traces = export_to(settings.trace_endpoint) if settings.trace_endpoint else None
    process = Process(settings, epoch)
    handlers.run(settings, start=process.start, stop=process.stop)
    if end_traces:
        end_traces()


if __name__ == "__main__":
    main()

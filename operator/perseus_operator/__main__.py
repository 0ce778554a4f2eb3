"""``perseus-operator``: settings, logging, metrics server; then kopf until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from perseus_operator import handlers
from perseus_operator.clients.agents import AgentPool, Credentials
from perseus_operator.clients.kube import EPOCH_CONFIG_MAP, KubeClient
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.services import Services
from perseus_operator.controller.view import JobView
from perseus_operator.errors import KubeError
from perseus_operator.reporting.metrics import Metrics, MetricsServer
from perseus_operator.servers.grpc_service import OperatorService, RpcServer
from perseus_operator.servers.web.server import WebServer
from perseus_operator.settings import Settings, settings_or_exit
from perseus_operator.solving.pool import SolverPool

logger = logging.getLogger("perseus_operator")

_PAGE_PATIENCE_S: Final = 5.0


class _JsonFormatter(logging.Formatter):
    """One object a line; ``job`` is what the message is about, where it begins with namespace/name."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.args and isinstance(record.args, tuple) and type(record.args[0]).__name__ == "JobRef":
            line["job"] = str(record.args[0])
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Process:
    """What lives as long as the process: made when kopf starts, taken down when it stops."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        self._settings = settings
        self._epoch = epoch
        self._metrics = Metrics()
        self._operator: Operator | None = None
        self._server: MetricsServer | None = None
        self._web: WebServer | None = None
        self._rpc: RpcServer | None = None

    async def start(self) -> Operator:
        """Begin to serve."""
        settings, epoch = self._settings, self._epoch
        kube = await KubeClient.connect()
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
                memory_mib=settings.solve_memory_mib,
            ),
            metrics=self._metrics,
            epoch=epoch,
            newest_epoch=partial(kube.newest_epoch, settings.agent_namespace),
            limits=settings.limits,
            status_interval_s=settings.status_interval_s,
            release_timeout_s=settings.release_timeout_s,
        )
        operator = Operator(settings, kube, services)
        await operator.start()
        self._operator = operator
        if settings.metrics_address:
            self._server = MetricsServer(
                settings.metrics_address, self._metrics, healthy=operator.unhealthy, ready=lambda: True
            )
        self._web = _web_server(settings.web_address, operator)
        self._rpc = await _rpc_server(settings, credentials, operator, epoch)
        serving = {"metrics": self._server, "web": self._web, "rpc": self._rpc}
        addresses = {name: server.address if server else "" for name, server in serving.items()}
        logger.info(
            "serving with epoch %d: %s", epoch, ", ".join(f"{k} on {v or 'none'}" for k, v in addresses.items())
        )
        if settings.ready_file:
            temporary = Path(settings.ready_file + ".new")  # whoever waits for the file reads it as soon as it is there
            temporary.write_text(json.dumps({"epoch": epoch, **addresses}))
            temporary.replace(settings.ready_file)
        return operator

    async def stop(self) -> None:
        """Take everything down. Leases stay, for the next operator."""
        if self._rpc is not None:
            await self._rpc.close()
        for server in (self._web, self._server):
            if server is not None:
                await asyncio.to_thread(server.close)
        if self._operator is not None:
            await self._operator.close()


def _web_server(address: str, operator: Operator) -> WebServer | None:
    """The page is a comfort: an address that is taken must not keep the operator from its work."""
    loop = asyncio.get_running_loop()

    def views() -> list[JobView]:
        return asyncio.run_coroutine_threadsafe(operator.views(), loop).result(timeout=_PAGE_PATIENCE_S)

    try:
        return WebServer(address, views) if address else None
    except OSError as error:
        logger.warning("no page: --web-address %s: %s", address, error)
        return None


async def _rpc_server(
    settings: Settings, credentials: Credentials | None, operator: Operator, epoch: int
) -> RpcServer | None:
    """Nor must an address on which infrastructure cannot tell of stragglers: telemetry shows them too."""
    if not settings.rpc_address or credentials is None:
        return None
    try:
        service = OperatorService(operator.declare_straggler, epoch, settings.rpc_allowed_sans)
        credentials = replace(credentials, ca=settings.rpc_ca or credentials.ca)
        return await RpcServer.start(settings.rpc_address, credentials, service)
    except OSError as error:
        logger.error("no set_straggler: --rpc-address %s: %s", settings.rpc_address, error)
        return None


async def _draw_epoch(namespace: str) -> int:
    kube = await KubeClient.connect()
    try:
        return await kube.next_epoch(namespace)
    finally:
        await kube.close()


def main() -> None:
    """Entry point."""
    settings = settings_or_exit(sys.argv[1:], os.environ)
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level, handlers=[handler])
    try:
        epoch = asyncio.run(_draw_epoch(settings.agent_namespace))
    except KubeError as error:
        # A wrong namespace, missing rights, no API server: said in one line; whoever runs us starts us again.
        logger.error("cannot start: ConfigMap %s/%s: %s", settings.agent_namespace, EPOCH_CONFIG_MAP, error)
        sys.exit(1)
    process = Process(settings, epoch)
    handlers.run(settings, start=process.start, stop=process.stop)


if __name__ == "__main__":
    main()

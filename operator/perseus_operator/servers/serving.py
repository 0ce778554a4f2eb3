"""Everything that one operator process serves: metrics and probes, the page, set_straggler, KEDA, and other
replicas.

An address that is in use stops neither the operator nor the other servers: the log says what is not served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from perseus_operator.clients.credentials import Credentials
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.peers import Peers
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.set_straggler import Declared, StragglerRequest
from perseus_operator.controller.settings import Settings
from perseus_operator.controller.view import View
from perseus_operator.errors import KubeUnavailable
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.objects.values import User
from perseus_operator.servers.grpc_service import OperatorService
from perseus_operator.servers.metrics_server import MetricsServer
from perseus_operator.servers.peer_service import PeerService
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.scaler_service import MOST_CALLS, ScalerService
from perseus_operator.servers.web.access import Access
from perseus_operator.servers.web.server import Pages, WebServer
from perseus_proto.externalscaler.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from perseus_proto.v1alpha1.operator_pb2_grpc import add_OperatorServicer_to_server
from perseus_proto.v1alpha1.peer_pb2_grpc import add_PeerServicer_to_server
from perseus_runtime.addresses import on_loopback, parse_address
from perseus_runtime.http_server import Certificate

logger = logging.getLogger(__name__)

_PAGE_TIMEOUT_S: Final = 5.0
T = TypeVar("T")


class Serving:
    """The servers of one process, in its event loop."""

    def __init__(self, settings: Settings, credentials: Credentials | None, kube: KubeClient) -> None:
        """Serve nothing yet; ``credentials`` None: without TLS, so neither set_straggler nor other replicas."""
        self._settings = settings
        self._credentials = credentials
        self._kube = kube
        self._loop = asyncio.get_running_loop()
        self._operator: Operator | None = None
        self._peers: Peers | None = None
        if credentials is not None and settings.peer_address:
            self._peers = Peers(replace(credentials, server_name=settings.peer_name), self._others)
        self._pages = Pages(self._views, None if self._peers is None else self._read_elsewhere)
        self._http: dict[str, MetricsServer | WebServer | None] = {}
        self._rpc: dict[str, RpcServer | None] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """host:port that is really bound, by server; empty: not served."""
        return {name: server.address if server else "" for name, server in {**self._http, **self._rpc}.items()}

    async def announce(self) -> str:
        """Serve other replicas; where they reach this one; empty: nowhere.

        They find it by its seat, so it answers them before it takes one.
        """
        settings = self._settings
        server = self._rpc["peer"] = await self._peer_server()
        if server is None:
            return ""
        bound, port = parse_address(server.address)
        host = settings.peer_host or bound
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def serve(self, operator: Operator, metrics: Metrics) -> None:
        """Serve everything else."""
        self._operator = operator
        if self._settings.metrics_address:
            self._http["metrics"] = MetricsServer(
                self._settings.metrics_address, metrics, healthy=operator.unhealthy, ready=lambda: True
            )
        self._http["web"] = self._web_server()
        self._rpc["rpc"] = await self._rpc_server()
        self._rpc["scaler"] = await self._scaler_server(operator)

    async def close(self) -> None:
        """Stop all servers."""
        for rpc in self._rpc.values():
            if rpc is not None:
                await rpc.close()
        for http in self._http.values():
            if http is not None:
                await asyncio.to_thread(http.close)

    # -------------------------------------------------------------------------------------------------- each server

    async def _peer_server(self) -> RpcServer | None:
        settings = self._settings
        if self._peers is None or self._credentials is None:
            return None
        service = PeerService(self._declare, self._pages.own_document, settings.peer_name)
        try:
            add = partial(add_PeerServicer_to_server, service)
            return await RpcServer.start(settings.peer_address, self._credentials, add)
        except OSError as error:
            logger.error("other replicas are not served: --peer-address %s: %s", settings.peer_address, error)
            return None

    async def _rpc_server(self) -> RpcServer | None:
        settings = self._settings
        if not settings.rpc_address or self._credentials is None:
            return None
        ask_others = None if self._peers is None else self._peers.declare
        service = OperatorService(self._declare, settings.rpc_allowed_sans, ask_others)
        try:
            credentials = replace(self._credentials, ca=settings.rpc_ca or self._credentials.ca)
            return await RpcServer.start(
                settings.rpc_address, credentials, partial(add_OperatorServicer_to_server, service)
            )
        except OSError as error:
            logger.error("set_straggler is not served: --rpc-address %s: %s", settings.rpc_address, error)
            return None

    async def _scaler_server(self, operator: Operator) -> RpcServer | None:
        settings = self._settings
        if not settings.scaler_address:
            return None
        service = ScalerService(operator.advised, settings.scaler_allowed_sans)
        files = Credentials(settings.scaler_cert, settings.scaler_key, settings.scaler_ca, server_name="")
        try:
            add = partial(add_ExternalScalerServicer_to_server, service)
            return await RpcServer.start(settings.scaler_address, files, add, most_calls=MOST_CALLS)
        except OSError as error:
            logger.error("KEDA is not served: --scaler-address %s: %s", settings.scaler_address, error)
            return None

    def _web_server(self) -> WebServer | None:
        settings, address = self._settings, self._settings.web_address
        try:
            if not address:
                return None
            if on_loopback(address):
                return WebServer(address, self._pages)
            certificate = Certificate(settings.web_cert, settings.web_key)
            return WebServer(address, self._pages, Access(_Reviews(self._kube, self._ask)), certificate)
        except OSError as error:
            logger.warning("the web page is not served: --web-address %s: %s", address, error)
            return None

    # ---------------------------------------------------------------------------------------------- what they need

    @property
    def _running(self) -> Operator:
        if self._operator is None:
            raise KubeUnavailable("the replica is starting")
        return self._operator

    def _others(self) -> tuple[str, ...]:
        return self._running.shards.others

    async def _declare(self, request: StragglerRequest) -> Declared:
        return await self._running.declare_straggler(request)

    def _views(self) -> list[View]:
        return self._ask(self._running.views())

    def _read_elsewhere(self, path: str) -> tuple[int, bytes]:
        assert self._peers is not None
        answer = self._ask(self._peers.page(path))
        return answer.status, answer.document

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Ask in the event loop, from a server's thread."""
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(timeout=_PAGE_TIMEOUT_S)


class _Reviews:
    """Asks the API server, for the threads of the page."""

    def __init__(self, kube: KubeClient, ask: Any) -> None:
        self._kube = kube
        self._ask = ask

    def user_of(self, token: str) -> User | None:
        user: User | None = self._ask(self._kube.user_of(token))
        return user

    def may_get(self, user: User, plural: str, namespace: str) -> bool:
        return bool(self._ask(self._kube.may_get(user, plural, namespace)))

"""Workers of the solver service, found by a name whose addresses are theirs, as a headless Service has.

A worker is asked for one piece of work at a time; whose turn it is, the slots decide. Which worker is asked first
follows from the work, so that replicas of the operator that ask for the same find the worker that has done it. A worker
that is busy for another replica, of another version or gone is no failure: the work waits until one is free.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Final

import grpc
import grpc.aio

from perseus_operator.clients.credentials import Credentials
from perseus_operator.solving.messages import BEGUN_METADATA, MAX_BYTES, InvalidAnswer, request_of, verdict_of
from perseus_operator.solving.pool import digest_of
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_operator.solving.slots import FairSlots
from perseus_runtime import direct
from perseus_runtime.addresses import parse_address
from perseus_runtime.tls import CallerCredentials

logger = logging.getLogger(__name__)

_LOOK_S: Final = 2.0
"""How often workers are looked up: a cluster's name server has new pods after some seconds, too."""
_PAUSE_S: Final = (0.2, 1.0)
"""Until all workers are asked again if none was free, at random: replicas do not all ask at the same moment."""
_WARN_S: Final = 60.0
"""After which it is said that no worker takes the work, and again after each such time."""
_MORE_THAN_A_SOLVE_S: Final = 60.0
"""A worker stops a solve itself; one that has not answered so long after that hangs."""
_WORK: Final = "/perseus.v1alpha1.Solver/Work"
_ENVELOPE_BYTES: Final = 4096
"""Of an answer, beside the frontier or calibration."""
DEATHS: Final = 3
"""Workers that were lost with the same work before it is taken for the cause."""
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 20_000),  # a node that went dark is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.enable_retries", 0),
    direct.GRPC,
)

Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""The addresses, host:port, of a name with a port."""


async def addresses_of(name: str) -> frozenset[str]:
    """Look a name up.

    Args:
        name: host:port.

    Returns:
        The address and port of each of its hosts.

    Raises:
        OSError: there is none, or the name server does not answer.
    """
    host, port = parse_address(name)
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = {str(at[0]) for *_, at in entries}
    return frozenset(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class SolverWorkers:
    """The workers of a solver service; see ``solving.pool.Workers``."""

    def __init__(self, name: str, files: Credentials, *, timeout_s: float, resolve: Resolve = addresses_of) -> None:
        """Look for nobody yet.

        Args:
            name: host:port; each address of the host is a worker's.
            files: for mutual TLS; the certificate of every worker carries ``server_name``.
            timeout_s: after which a worker stops a solve.
            resolve: looks the name up.
        """
        self.slots = FairSlots(0)
        self._name = name
        self._files = CallerCredentials(key=files.key, cert=files.cert, ca=files.ca)
        self._server_name = files.server_name
        self._credentials: grpc.ChannelCredentials | None = None
        self._timeout_s = timeout_s + _MORE_THAN_A_SOLVE_S
        self._resolve = resolve
        self._workers: frozenset[str] = frozenset()
        self._asked: set[str] = set()
        self._version = version("perseus-k8s")
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for workers from now on."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def run(self, task: Task, request: bytes, most_bytes: int = MAX_BYTES) -> Verdict:
        """Have one of the workers do a piece of work, however long none is free. That it took too much time or memory,
        which is remembered, two must say where there are two.
        """
        message, digest = await asyncio.to_thread(self._message, task, request)
        lost, since_s, said = 0, time.monotonic(), dict[str, Verdict]()
        while True:
            why = "none is known"
            if said and self._workers <= said.keys():
                return next(iter(said.values()))
            free = self._workers - self._asked - said.keys()
            for address in sorted(free, key=lambda one: _distance(digest, one)):
                self._asked.add(address)
                try:
                    verdict = await self._ask(address, message, most_bytes)
                    if not verdict.exhausted or said:
                        return verdict
                    said[address], why = verdict, f"{address}: {verdict.message}"
                except _Busy as error:
                    why = str(error)
                except _Lost as error:
                    lost, why = lost + 1, str(error)
                    logger.warning("a worker of the solver service was lost with its work: %s", error)
                    if lost == DEATHS:
                        message_text = (
                            f"{DEATHS} workers of the solver service were lost with this work, the last: {why}"
                        )
                        return Verdict(Outcome.DIED, message=message_text)
                finally:
                    self._asked.discard(address)
            if time.monotonic() - since_s >= _WARN_S:
                since_s = time.monotonic()
                logger.warning("no worker of the solver service at %s takes work; the last: %s", self._name, why)
            await asyncio.sleep(random.uniform(*_PAUSE_S))  # noqa: S311  # no secret

    def _message(self, task: Task, request: bytes) -> tuple[bytes, bytes]:
        """What a worker is sent, and the digest of the work."""
        return request_of(task, request, self._version).SerializeToString(), digest_of(task, request)

    async def _ask(self, address: str, message: bytes, most_bytes: int) -> Verdict:
        self._credentials = self._files.renewed() or self._credentials
        if self._credentials is None:
            raise _Busy("--tls-cert, --tls-key, --solver-ca: the files cannot be read")
        options = (
            *_OPTIONS,
            ("grpc.ssl_target_name_override", self._server_name),
            ("grpc.max_receive_message_length", most_bytes + _ENVELOPE_BYTES),
        )
        begun = False
        async with grpc.aio.secure_channel(address, self._credentials, options=options) as channel:
            try:
                # As bytes in both directions: messages of this size are made and read in threads.
                call = channel.unary_unary(_WORK)(message, timeout=self._timeout_s)
                begun = BEGUN_METADATA in await call.initial_metadata()
                return await asyncio.to_thread(verdict_of, await call)
            except grpc.aio.AioRpcError as error:
                expired = f"{self._files.expired}: " if self._files.expired else ""
                where = f"{expired}{address}: {error.code().name}: {(error.details() or '')[:200]}"
                raise (_Lost if begun else _Busy)(where) from error
            except InvalidAnswer as error:
                raise _Lost(f"{address}: {error}") from error

    async def _look(self) -> None:
        reported = ""
        while True:
            try:
                self._workers, problem = await self._resolve(self._name), ""
            except OSError as error:
                # While the name server is away, the workers known so far are still there.
                problem = str(error)
            if problem != reported:
                reported = problem
                logger.warning("the solver service at %s: %s", self._name, problem or "found again")
            self.slots.resize(len(self._workers))
            await asyncio.sleep(_LOOK_S)


def _distance(digest: bytes, address: str) -> bytes:
    """The worker with the least is asked first; others hardly change places if one comes or goes."""
    return hashlib.sha256(digest + address.encode()).digest()


class _Busy(Exception):
    """The worker does not take the work."""


class _Lost(Exception):
    """The worker had begun, and its answer will not come."""

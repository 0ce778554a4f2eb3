"""``perseus-solver``: one worker of the solver service, until it is stopped or has been idle for long enough.

A worker that is to stop ends the work under way and begins no other. Exit codes: 0: it was stopped, or was idle. 1: an
address is in use, or a certificate cannot be read. 2: a setting is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from functools import partial
from importlib.metadata import version
from typing import Final

from perseus_operator.clients.credentials import Credentials
from perseus_operator.servers.metrics_server import MetricsServer
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.solver.metrics import SolverMetrics
from perseus_operator.servers.solver.service import SolverService
from perseus_operator.servers.solver.settings import SolverSettings
from perseus_operator.solving.memory import container_limit_mib, worker_memory_mib
from perseus_operator.solving.messages import MAX_BYTES
from perseus_operator.solving.process import run_worker
from perseus_proto.v1alpha1.solver_pb2_grpc import add_SolverServicer_to_server
from perseus_runtime.logs import log_to_stderr
from perseus_runtime.ready_file import write_ready_file
from perseus_runtime.settings import parse_or_exit

logger = logging.getLogger("perseus_operator.servers.solver")

_LOOK_S: Final = 0.5
"""How often it is looked whether the worker is idle."""


async def serve(settings: SolverSettings) -> None:
    """Serve until a signal, or until there has been no work for long enough.

    Raises:
        OSError: an address cannot be bound, or a certificate cannot be read.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    memory_mib = worker_memory_mib(settings.solve_memory_mib, processes=1, limit_mib=container_limit_mib())
    metrics = SolverMetrics()
    service = SolverService(
        partial(run_worker, timeout_s=settings.solve_timeout_s, memory_mib=memory_mib, most_bytes=MAX_BYTES),
        metrics,
        version=version("perseus-k8s"),
        allowed_sans=settings.allowed_sans,
    )
    files = Credentials(settings.tls_cert, settings.tls_key, settings.tls_ca)
    add = partial(add_SolverServicer_to_server, service)
    rpc = await RpcServer.start(settings.address, files, add, max_bytes=MAX_BYTES)
    http = None
    if settings.metrics_address:
        http = MetricsServer(settings.metrics_address, metrics, healthy=lambda: None, ready=lambda: not stop.is_set())
    addresses = {"address": rpc.address, "metrics": http.address if http else ""}
    logger.info("serving: %s", ", ".join(f"{name} on {where or 'none'}" for name, where in addresses.items()))
    write_ready_file(settings.ready_file, addresses)
    while not stop.is_set() and not 0 < settings.exit_when_idle_s <= service.idle_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_S if settings.exit_when_idle_s else None)
    service.stopping = True
    logger.info("stopping: %s", "requested" if stop.is_set() else f"no work for {settings.exit_when_idle_s:g} s")
    await service.ended()
    await rpc.close()
    if http is not None:
        http.close()


def main() -> None:
    """Run one worker; the entry point of ``perseus-solver``."""
    settings = parse_or_exit(SolverSettings, sys.argv[1:], os.environ)
    log_to_stderr(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
    except OSError as error:
        logger.error("cannot start: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()

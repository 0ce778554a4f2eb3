"""``perseus-operator``: reads settings, sets up logging, draws an epoch, and runs kopf until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.clients.credentials import Credentials
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.kube.leases import EPOCH_LEASE, LeaseClient
from perseus_operator.clients.solvers import SolverWorkers
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.settings import Settings
from perseus_operator.errors import KubeError, UnusableArgument
from perseus_operator.families.registry import FAMILIES, Kind
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.services import Services
from perseus_operator.jobs.tracing import log_fields
from perseus_operator.objects.values import JobRef
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.replicas.shard import Notes, identity_of
from perseus_operator.replicas.shards import Replica
from perseus_operator.servers import handlers
from perseus_operator.servers.serving import Serving
from perseus_operator.solving.memory import container_limit_mib, worker_memory_mib
from perseus_operator.solving.pool import RESTORES, SPARE, SolverPool
from perseus_runtime.addresses import parse_address
from perseus_runtime.direct import bypass_proxies
from perseus_runtime.logs import log_to_stderr
from perseus_runtime.ready_file import write_ready_file
from perseus_runtime.settings import parse_or_exit

logger = logging.getLogger("perseus_operator")


def job_field(record: logging.LogRecord) -> dict[str, str]:
    """The PerseusJob that a log record is about: its first argument, where that is a JobRef; and the trace, if any."""
    if record.args and isinstance(record.args, tuple) and isinstance(record.args[0], JobRef):
        return {"job": str(record.args[0]), **log_fields()}
    return log_fields()


class Process:
    """Everything that lives as long as the process: created when kopf starts, closed when it stops."""

    def __init__(self, settings: Settings, epoch: int, kinds: Sequence[Kind]) -> None:
        self._settings = settings
        self._kinds = kinds
        self._epoch = epoch
        self._metrics = Metrics()
        self._operator: Operator | None = None
        self._serving: Serving | None = None
        self._leases: LeaseClient | None = None
        self._solvers: SolverWorkers | None = None

    async def start(self) -> Operator:
        """Start the operator and its servers."""
        settings, epoch = self._settings, self._epoch
        kube = await KubeClient.connect()
        leases = self._leases = await LeaseClient.connect_to(settings.agent_namespace)
        credentials = (
            None
            if settings.insecure
            else Credentials(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_server_name)
        )
        if credentials is not None and settings.solver_address:
            self._solvers = _solver_workers(settings, credentials)
            await self._solvers.start()
        solver = SolverPool(
            workers=settings.solve_workers,
            timeout_s=settings.solve_timeout_s,
            memory_mib=worker_memory_mib(
                settings.solve_memory_mib,
                processes=RESTORES if self._solvers else settings.solve_workers + SPARE + RESTORES,
                limit_mib=container_limit_mib(),
            ),
            service=self._solvers,
        )
        self._metrics.watch_solvers(solver.solvers.slots)
        identity = identity_of(settings.replica or socket.gethostname(), uuid.uuid4().hex[:8])
        services = Services(
            kube=kube,
            agents=AgentPool(credentials, timeout_s=settings.agent_timeout_s),
            solver=solver,
            metrics=self._metrics,
            epochs=Epochs(leases, identity),
            limits=settings.limits,
            namespaces=settings.namespace_list,
            resource_slices=settings.resource_slices,
            status_interval_s=settings.status_interval_s,
            release_timeout_s=settings.release_timeout_s,
        )
        serving = self._serving = Serving(settings, credentials, kube)
        notes = Notes(await serving.announce(), ",".join(sorted(settings.namespace_list)))
        replica = Replica(leases, identity, epoch, notes)
        operator = self._operator = Operator(settings, kube, services, replica, self._kinds)
        await operator.start()
        await serving.serve(operator, self._metrics)
        addresses = serving.addresses
        logger.info(
            "serving with epoch %d: %s", epoch, ", ".join(f"{k} on {v or 'none'}" for k, v in addresses.items())
        )
        write_ready_file(settings.ready_file, {"epoch": epoch, **addresses})
        return operator

    async def stop(self) -> None:
        """Stop the servers and the operator. The agents' leases stay, for the replica that takes over."""
        if self._serving is not None:
            await self._serving.close()
        if self._operator is not None:
            await self._operator.close()
        if self._solvers is not None:
            await self._solvers.close()
        if self._leases is not None:
            await self._leases.close()


def _solver_workers(settings: Settings, credentials: Credentials) -> SolverWorkers:
    """The workers of the solver service that the settings name."""
    files = replace(
        credentials,
        ca=settings.solver_ca or credentials.ca,
        server_name=settings.solver_name or parse_address(settings.solver_address)[0],
    )
    return SolverWorkers(settings.solver_address, files, timeout_s=settings.solve_timeout_s)


def _export_traces(settings: Settings) -> Callable[[], None]:
    """Begin to send a collector traces; returns what ends that."""
    # Imported here: without an endpoint, nothing of it is needed.
    from perseus_operator.clients.otlp import export_traces

    instance = settings.replica or socket.gethostname()
    return export_traces(settings.otlp_endpoint, instance, version("perseus-k8s"))


async def _draw_epoch(namespace: str) -> int:
    leases = await LeaseClient.connect_to(namespace)
    try:
        return await leases.next_epoch()
    finally:
        await leases.close()


def main(kinds: Sequence[Kind] = FAMILIES) -> None:
    """Run the operator; the entry point of ``perseus-operator``.

    Args:
        kinds: the families that it serves; see ``FAMILIES``.
    """
    settings = parse_or_exit(Settings, sys.argv[1:], os.environ)
    log_to_stderr(settings.log_level, settings.log_format, job_field)
    bypass_proxies()
    try:
        epoch = asyncio.run(_draw_epoch(settings.agent_namespace))
    except UnusableArgument as error:
        logger.error("cannot start: no service account, and %s", error)
        sys.exit(2)
    except KubeError as error:
        # A wrong namespace, missing rights or no API server: one line in the log, and Kubernetes restarts the pod.
        logger.error("cannot start: Lease %s/%s: %s", settings.agent_namespace, EPOCH_LEASE, error)
        sys.exit(1)
    process = Process(settings, epoch, kinds)
    end_traces = _export_traces(settings) if settings.otlp_endpoint else None
    handlers.run(settings, start=process.start, stop=process.stop)
    if end_traces:
        end_traces()


if __name__ == "__main__":
    main()

"""A cluster of light agents on an API server: nodes, pods and PerseusJobs as objects, operators as processes.

All of it runs in one event loop. The API server may be shared: everything is in two namespaces of this cluster.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import kubernetes.aio.client as k8s
import kubernetes.aio.config as k8s_config
from tests.doubles.fleet import Fleet
from tests.doubles.light_job import LightJob, LightRank, Work
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_sim.cluster import rbac
from perseus_sim.cluster.simulated_cluster import SYSTEM_NAMESPACE
from perseus_sim.processes import Child, Processes

T = TypeVar("T")
MERGE: Final = "application/merge-patch+json"
GROUP: Final = (keys.API_GROUP, keys.API_VERSION)
_AT_ONCE: Final = 32
_config: Any = k8s_config  # its functions carry no types


@dataclass(frozen=True)
class Operator:
    """One operator process."""

    child: Child
    epoch: int
    metrics: str
    web: str = ""

    @property
    def log(self) -> str:
        """Its log."""
        return self.child.log.read_text(errors="replace")

    def kill(self) -> None:
        """As by the kernel, out of memory."""
        self.child.signal(signal.SIGKILL)
        self.child.popen.wait()

    def scrape(self, path: str = "/metrics") -> str:
        """Its metrics, or a probe's answer."""
        with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def page(self, path: str) -> Any:
        """A document of its page, where it serves one."""
        with urllib.request.urlopen(f"http://{self.web}{path}", timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        """A series without labels, or the sum over its labels."""
        samples = [line.rpartition(" ") for line in self.scrape().splitlines() if line.startswith(name)]
        return sum(float(value) for series, _, value in samples if series.split("{")[0] == name)


class FleetCluster:
    """Use as a context. The CRD must be there before."""

    core: Any
    custom: Any

    def __init__(
        self,
        fleet: Fleet,
        *,
        admin: Path,
        operator: Path,
        namespace: str,
        processes: Processes,
        folder: Path,
        tls: Path | None = None,
    ) -> None:
        """``admin`` and ``operator`` are kubeconfigs; ``namespace`` is of the jobs, and begins the name of the other
        one. ``tls``: certificates of the operator."""
        self.fleet = fleet
        self.namespace, self.system = namespace, f"{namespace}-system"
        self.operators: list[Operator] = []
        self._admin, self._login = admin, operator
        self._processes, self._folder, self._tls = processes, folder, tls
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._api: Any = None

    async def __aenter__(self) -> FleetCluster:
        configuration = k8s.Configuration()
        configuration.connection_pool_maxsize = _AT_ONCE
        await _config.load_kube_config(str(self._admin), client_configuration=configuration)
        self._api = k8s.ApiClient(configuration)
        self.core, self.custom = k8s.CoreV1Api(self._api), k8s.CustomObjectsApi(self._api)
        for name in (self.namespace, self.system):
            await self.core.create_namespace({"metadata": {"name": name}})
            await self._account(name)
        await self._grant()
        return self

    async def __aexit__(self, *_: object) -> None:
        for operator in self.operators:
            await asyncio.to_thread(operator.kill)
        await self._api.close()

    async def all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """A bounded number at a time."""

        async def one(coroutine: Coroutine[Any, Any, T]) -> T:
            async with self._at_once:
                return await coroutine

        return await asyncio.gather(*(one(coroutine) for coroutine in work))

    # ------------------------------------------------------------------------------------------------- operators

    async def start_operator(self, *arguments: str) -> Operator:
        """Another operator process, which serves this cluster's jobs."""
        number = len(self.operators)
        ready = self._folder / f"ready-{number}.json"
        tls = ["--insecure"]
        if self._tls is not None:
            files = {"cert": "perseus-operator.crt", "key": "perseus-operator.key", "ca": "ca.crt"}
            tls = [part for flag, file in files.items() for part in (f"--tls-{flag}", str(self._tls / file))]
        command = [
            *(sys.executable, "-m", "perseus_operator", *tls, "--ready-file", str(ready)),
            *("--namespaces", self.namespace, "--agent-namespace", self.system),
            *("--metrics-address", "127.0.0.1:0", "--web-address", "", *arguments),
        ]
        child = self._processes.start(
            f"{self.namespace}-operator-{number}", command, environment={"KUBECONFIG": str(self._login)}
        )
        await asyncio.to_thread(child.wait_until, ready.exists, 180.0)
        told = json.loads(ready.read_text())
        operator = Operator(child, told["epoch"], told["metrics"], told["web"])
        self.operators.append(operator)
        return operator

    # ------------------------------------------------------------------------------------------------- objects

    async def add_nodes(self, count: int) -> list[str]:
        """Nodes with an agent each."""
        first = len(self.fleet.agents)
        names = [f"{self.namespace}-{number}" for number in range(first, first + count)]
        agents = await self.fleet.add(names)
        await self.all(self.core.create_node({"metadata": {"name": name}, "spec": {}}) for name in names)
        labels = {keys.LABEL_COMPONENT: keys.COMPONENT_AGENT}
        await self.all(self._pod(self.system, f"agent-{a.node}", a.node, labels, port=a.port) for a in agents)
        return names

    async def profile(self, text: str, name: str = "profile") -> None:
        """A ConfigMap with a profile."""
        body = {"metadata": {"name": name}, "data": {keys.PROFILE_KEY: text}}
        await self.core.create_namespaced_config_map(self.namespace, body)

    async def start_training(
        self, name: str, nodes: Sequence[str], work: Work, *, tensor_parallel: int = 1
    ) -> LightJob:
        """Pods and processes of a training job: a pipeline on each node, a GPU for each stage; or, with tensor
        parallelism, one stage of a pipeline on each node.
        """
        stages = len(work.default_us)
        ranks = {}
        for number, node in enumerate(nodes):
            if tensor_parallel == 1:
                places = [(number, stage, 0) for stage in range(stages)]
            else:
                places = [(*divmod(number, stages), tp) for tp in range(tensor_parallel)]
            ranks[node] = tuple(
                LightRank(self.namespace, f"{name}-{number}", dp, stage, f"GPU-{node}-{name}-{gpu}", 100 + gpu, tp)
                for gpu, (dp, stage, tp) in enumerate(places)
            )
        job = LightJob(self.namespace, name, ranks, work)
        self.fleet.start(job)
        for number, node in enumerate(nodes):
            await self._pod(self.namespace, f"{name}-{number}", node, {keys.LABEL_JOB: name})
        return job

    async def end_training(self, job: LightJob) -> None:
        """Remove its processes and pods."""
        self.fleet.end(job)
        for pod in {rank.pod for ranks in job.ranks.values() for rank in ranks}:
            await self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)

    async def apply(self, name: str, spec: Mapping[str, Any]) -> Any:
        """Create a PerseusJob."""
        body = {"apiVersion": "/".join(GROUP), "kind": keys.KIND, "metadata": {"name": name}, "spec": dict(spec)}
        return await self.custom.create_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL, body)

    async def patch(self, name: str, body: Mapping[str, Any]) -> Any:
        """Edit one, by a merge patch."""
        return await self.custom.patch_namespaced_custom_object(
            *GROUP, self.namespace, keys.PLURAL, name, dict(body), _content_type=MERGE
        )

    async def delete(self, name: str) -> None:
        """Delete one."""
        await self.custom.delete_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL, name)

    async def jobs(self) -> dict[str, Any]:
        """All PerseusJobs by name."""
        found = await self.custom.list_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL)
        return {job["metadata"]["name"]: job for job in found["items"]}

    async def frontier(self, name: str) -> Any:
        """The PerseusFrontier of this name."""
        return await self.custom.get_namespaced_custom_object(*GROUP, self.namespace, keys.FRONTIER_PLURAL, name)

    async def _pod(self, namespace: str, name: str, node: str, labels: Mapping[str, str], port: int = 0) -> None:
        ports = [{"name": keys.AGENT_GRPC_PORT_NAME, "containerPort": port}] if port else []
        container = {"name": "main", "image": "simulated", "ports": ports}
        body: Any = {
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": {"nodeName": node, "containers": [container], "automountServiceAccountToken": False},
        }
        await self.core.create_namespaced_pod(namespace, body)
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "conditions": [ready]}
        await self.core.patch_namespaced_pod_status(name, namespace, {"status": status}, _content_type=MERGE)

    async def _grant(self) -> None:
        # The operator counts epochs beside the agents; its service account is where tests put it.
        role, binding = rbac.agents_manifest(self.system, SYSTEM_NAMESPACE)
        roles: Any = k8s.RbacAuthorizationV1Api(self._api)
        await roles.create_namespaced_role(self.system, role)
        await roles.create_namespaced_role_binding(self.system, binding)

    async def _account(self, namespace: str) -> None:
        # A real API server refuses pods without it, and a controller may be quicker than we are, or absent.
        try:
            await self.core.create_namespaced_service_account(namespace, {"metadata": {"name": "default"}})
        except k8s.ApiException as error:
            if error.status != 409:
                raise

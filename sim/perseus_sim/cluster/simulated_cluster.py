"""A cluster on one machine: API server, nodes with GPUs and agents, the operator, training jobs; for demo and tests.

Everything is a real process or the production code, but for the doubles: the API server (``apiserver``, unless a real
one is requested), the kubelet, the GPUs and the training. Operator and agents speak
mutual TLS. All state lies in one folder; leaving the context stops every process, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from kubernetes import client, config, dynamic

from perseus_core import keys
from perseus_core.rank import RankId
from perseus_core.units import mw_from_w
from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Feature, Server, embedded_server
from perseus_sim.cluster.pki import Authority, write_pairs
from perseus_sim.cluster.restarts import Restarts
from perseus_sim.gpus.kubelet import AdmittedPod, KubeletDouble
from perseus_sim.gpus.model import GpuModel
from perseus_sim.gpus.shared_gpu import GpuSpec, SharedGpu
from perseus_sim.processes import Child, Processes
from perseus_sim.training.job import RankSpec, TrainingJob, TrainingSpec
from perseus_solver.model.problem import Problem

log = logging.getLogger(__name__)

SYSTEM_NAMESPACE = "perseus-system"
_AGENT_FLAGS = ("--min-switch-interval-us", "200", "--sample-interval-ms", "10", "--watch-interval-ms", "100")
"""Simulated time runs faster than the wall clock, and the agent's settings are in wall time."""


@dataclass
class SimulatedNode:
    """One node."""

    name: str
    number: int
    folder: Path
    gpus: list[SharedGpu]
    kubelet: KubeletDouble
    agent: Child | None = None
    agent_arguments: Sequence[str] = ()
    agent_pod: str = ""
    grpc_address: str = "127.0.0.1:0"
    metrics_address: str = "127.0.0.1:0"
    allocated: set[str] = field(default_factory=set)

    @property
    def socket(self) -> Path:
        """The agent's socket for training processes."""
        return self.folder / "agent.sock"


@dataclass
class RunningJob:
    """A training job and its pods."""

    name: str
    namespace: str
    training: TrainingJob
    pods: dict[str, tuple[SimulatedNode, AdmittedPod]]
    gpus: dict[int, list[SharedGpu]]
    """By pipeline, in the order of stages."""


class SimulatedCluster:
    """Use as a context. ``api`` is a connected Kubernetes client once the context is entered."""

    api: Any
    core: Any
    server: Server

    def __init__(
        self,
        folder: Path | None = None,
        *,
        server: Callable[[Path], contextlib.AbstractContextManager[Server]] = embedded_server,
    ) -> None:
        """``folder`` holds state and logs (its path must be short, since sockets lie in it); None: a temporary one,
        removed on success. ``server`` starts the API server; on one with RBAC the operator has a service account of its
        own.
        """
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="perseus-")) if folder is None else folder
        self.tls = self.folder / "tls"
        self.nodes: dict[str, SimulatedNode] = {}
        self.jobs: list[RunningJob] = []
        self.operator: Child | None = None
        self.processes = Processes(self.folder / "logs")
        self._restarts = Restarts(self._start_agents_again)
        self._start_server = server
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.server = undo.enter_context(self._start_server(self.folder / "api"))
            undo.callback(self._restarts.join)  # what its thread has started ends with it
            undo.enter_context(self.processes)
            undo.callback(self._stop_kubelets)
            self._restarts.start()
            undo.callback(self._restarts.stop)
            # As in production: agent and operator trust one authority, and each other's names.
            write_pairs(self.tls, Authority("perseus-sim"), ("perseus-agent", "perseus-operator"))
            connect: Any = config.new_client_from_config
            self.api = undo.enter_context(connect(str(self.server.kubeconfig)))
            self.core = client.CoreV1Api(self.api)
            self.core.create_namespace({"metadata": {"name": SYSTEM_NAMESPACE}})
            self._open = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if self._temporary and error is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -------------------------------------------------------------------------------- control plane

    def _tls_flags(self, name: str) -> list[str]:
        files = {"cert": f"{name}.crt", "key": f"{name}.key", "ca": "ca.crt"}
        return [part for flag, file in files.items() for part in (f"--tls-{flag}", str(self.tls / file))]

    def _operator_login(self) -> Path:
        """The kubeconfig of the operator: its service account's, or on a server without accounts the
        administrator's."""
        if Feature.RBAC not in self.server.features:
            return self.server.kubeconfig
        for document in rbac.operator_manifest(SYSTEM_NAMESPACE):
            self.apply(document)
        into = self.folder / "operator.kubeconfig"
        return rbac.log_in(self.server.kubeconfig, SYSTEM_NAMESPACE, "perseus-operator", into)

    def apply(self, manifest: Path | str | Mapping[str, Any], namespace: str = "default") -> None:
        """Create or change every object of a manifest (a file, a folder of them, YAML, or one object), by server-side
        apply.
        """
        if isinstance(manifest, Path) and manifest.is_dir():
            for path in sorted(manifest.glob("*.yaml")):
                self.apply(path, namespace)
            return
        text = manifest.read_text() if isinstance(manifest, Path) else manifest
        documents = [text] if isinstance(text, Mapping) else [doc for doc in yaml.safe_load_all(text) if doc]
        for document in documents:
            # A separate cache: the default one is shared by all servers that ever listened on this port.
            connect: Any = dynamic.DynamicClient
            kinds = connect(self.api, cache_file=str(self.folder / "discovery.json"))
            resource = kinds.resources.get(api_version=document["apiVersion"], kind=document["kind"])
            place = {"namespace": document["metadata"].get("namespace", namespace)} if resource.namespaced else {}
            resource.server_side_apply(document, field_manager="perseus-sim", force_conflicts=True, **place)

    def start_operator(self, *arguments: str, program: Sequence[str] = ("-m", "perseus_operator")) -> Child:
        """Start the operator; again after ``stop_operator``, as one that was restarted.

        Args:
            arguments: further flags.
            program: what Python runs.
        """
        ready = self.folder / "operator.ready"
        ready.unlink(missing_ok=True)
        self.operator = self.processes.start(
            "operator",
            [
                *(sys.executable, *program, *self._tls_flags("perseus-operator")),
                *("--agent-namespace", SYSTEM_NAMESPACE, "--agent-poll-s", "0.5"),
                *("--metrics-address", "127.0.0.1:0", "--web-address", "127.0.0.1:0", "--ready-file", str(ready)),
                *arguments,
            ],
            environment={"KUBECONFIG": str(self._operator_login())},
        )
        self.operator.wait_until(ready.exists)
        return self.operator

    def stop_operator(self) -> None:
        """Stop it politely."""
        if self.operator is not None:
            self.operator.stop()
            self.operator = None

    # ---------------------------------------------------------------------------------------- nodes

    def add_node(
        self,
        name: str,
        gpus: int,
        model: GpuModel,
        *,
        clocks_mhz: Sequence[int] = (),
        switch_latency_us: int = 0,
        driver: str = "",
        speed: int = 1,
        agent_arguments: Sequence[str] = (),
    ) -> SimulatedNode:
        """A node with GPUs of one model, a kubelet, and a running agent with its clock keeper.

        Args:
            name: of the node.
            gpus: how many.
            model: what they are.
            clocks_mhz: their supported clocks, if others than the model's: those of a profile.
            switch_latency_us: virtual time that a clock change takes.
            driver: a key of ``MODELS`` whose driver is simulated in the machine's time; empty: none.
            speed: how many times faster than the model that driver is: as much as what the job executes.
            agent_arguments: further flags of the agent.
        """
        number = len(self.nodes)
        folder = self.folder / f"n{number}"
        specs = [
            GpuSpec(
                uuid=f"GPU-{number:08x}-0000-4000-8000-{index:012x}",
                model=model.faster(speed).name,
                supported_clocks_mhz=tuple(sorted(clocks_mhz or model.clocks_mhz)),
                blocking_power_mw=mw_from_w(model.blocking_power_w),
                switch_latency_us=switch_latency_us,
                driver=driver,
                speed=speed,
            )
            for index in range(gpus)
        ]
        shared = [SharedGpu.create(folder / "gpus", spec) for spec in specs]
        node = SimulatedNode(name, number, folder, shared, KubeletDouble(folder))
        self.nodes[name] = node
        node.kubelet.start()
        self.core.create_node({"metadata": {"name": name}, "spec": {}})
        self.processes.start(f"keeper-{node.name}", self._agent_command(node, "keep"))
        self.start_agent(node, *agent_arguments)
        return node

    def _agent_command(self, node: SimulatedNode, *subcommand: str) -> list[str]:
        return [
            *(sys.executable, "-m", "perseus_agent", *subcommand, *self._tls_flags("perseus-agent")),
            *("--node-name", node.name),
            *("--devices", f"perseus_sim.gpus.devices:open_devices:{node.folder / 'gpus'}"),
            *("--socket", str(node.socket), "--journal", str(node.folder / "journal.json")),
            *("--keeper-socket", str(node.folder / "keeper.sock")),
            *("--grpc-address", node.grpc_address, "--metrics-address", node.metrics_address),
            *("--proc-root", str(node.kubelet.proc_root), "--pod-resources-socket", str(node.kubelet.socket)),
        ]

    def start_agent(self, node: SimulatedNode, *arguments: str) -> Child:
        """Start a node's agent, and show its pod in the API; again after ``kill_agent``, at the same address."""
        node.agent_arguments = arguments
        ready = node.folder / "agent.ready"
        ready.unlink(missing_ok=True)
        agent = self.processes.start(
            f"agent-{node.name}",
            [*self._agent_command(node), "--ready-file", str(ready), *_AGENT_FLAGS, *arguments],
        )
        agent.wait_until(ready.exists)
        node.agent = agent
        addresses = json.loads(ready.read_text())
        node.grpc_address, node.metrics_address = addresses["grpc"], addresses["metrics"]
        if not node.agent_pod:
            node.agent_pod = f"perseus-agent-{node.number}"
            port = int(node.grpc_address.rpartition(":")[2])
            self.run_pod(
                SYSTEM_NAMESPACE,
                node.agent_pod,
                node.name,
                {keys.LABEL_COMPONENT: keys.COMPONENT_AGENT},
                [{"name": keys.AGENT_GRPC_PORT_NAME, "containerPort": port}],
            )
        return agent

    def kill_agent(self, node: SimulatedNode) -> None:
        """End a node's agent with SIGKILL. It stays away until ``start_agent``; one that ends otherwise is started
        again, as a kubelet does.
        """
        with self._restarts.paused:
            agent, node.agent = node.agent, None
        if agent is not None:
            agent.signal(signal.SIGKILL)
            agent.popen.wait()

    def _start_agents_again(self) -> None:
        for node in list(self.nodes.values()):
            if node.agent is not None and not node.agent.running:
                code = node.agent.popen.returncode
                log.warning("%s ended with code %s, and starts again:\n%s", node.agent.name, code, node.agent.tail(5))
                self.start_agent(node, *node.agent_arguments)

    def _stop_kubelets(self) -> None:
        for node in self.nodes.values():
            node.kubelet.stop()

    # ----------------------------------------------------------------------------------------- jobs

    def start_job(
        self,
        name: str,
        problem: Problem,
        *,
        pipelines: int,
        namespace: str = "default",
        labels: Mapping[str, str] | None = None,
        begin: bool = True,
        **simulation: Any,
    ) -> RunningJob:
        """Pods and processes of a training job: one pod for each pipeline, on the nodes in turn, a GPU for each stage.

        Args:
            name: of the PerseusJob that the pods opt in to, and of the pods.
            problem: what the job executes.
            pipelines: data-parallel size.
            namespace: of the pods.
            labels: further labels of the pods.
            begin: train at once; otherwise call ``training.begin()``.
            simulation: further fields of ``perseus_sim.training.job.TrainingSpec``.

        Raises:
            ValueError: a node has too few free GPUs.
        """
        nodes = list(self.nodes.values())
        gpus: dict[int, list[SharedGpu]] = {}
        ranks: list[RankSpec] = []
        for dp in range(pipelines):
            node = nodes[dp % len(nodes)]
            free = [gpu for gpu in node.gpus if gpu.spec.uuid not in node.allocated][: problem.stages]
            if len(free) < problem.stages:
                raise ValueError(f"{node.name} has {len(free)} free GPUs, pipeline {dp} needs {problem.stages}")
            gpus[dp] = free
            node.allocated |= {gpu.spec.uuid for gpu in free}
            ranks += [RankSpec(RankId(dp, stage), gpu.path, socket=str(node.socket)) for stage, gpu in enumerate(free)]
        training = TrainingJob(
            TrainingSpec(problem, tuple(ranks), **simulation), self.folder / name, self.processes, name
        )
        job = RunningJob(name, namespace, training, {}, gpus)
        self.jobs.append(job)
        for dp in range(pipelines):
            node = nodes[dp % len(nodes)]
            pod_name = f"{name}-{dp}"
            pod_labels = {"app": name, keys.LABEL_JOB: name, **(labels or {})}
            uuids = tuple(gpu.spec.uuid for gpu in gpus[dp])
            uid = self.run_pod(namespace, pod_name, node.name, pod_labels, [])
            pod = AdmittedPod(uid, namespace, pod_name, uuids)
            node.kubelet.admit(pod)
            node.kubelet.place([child.pid for rank, child in training.children.items() if rank.dp == dp], uid)
            job.pods[pod_name] = (node, pod)
        if begin:
            training.begin()
        return job

    def stop_job(self, job: RunningJob) -> None:
        """End the training after its current iteration; its pods succeed, and leave."""
        job.training.stop()
        for name, (node, pod) in job.pods.items():
            status = {"status": {"phase": "Succeeded"}}
            self.core.patch_namespaced_pod_status(name, job.namespace, status)
            node.kubelet.remove(pod.uid)
            node.allocated -= set(pod.gpu_uuids)
            self.core.delete_namespaced_pod(name, job.namespace, grace_period_seconds=0)
        self.jobs.remove(job)

    def run_pod(self, namespace: str, name: str, node: str, labels: dict[str, str], ports: list[dict[str, Any]]) -> str:
        """A pod that runs on a node of this machine; returns its UID."""
        if Feature.CONTROLLERS in self.server.features:
            self._await_account(namespace)
        container = {"name": "main", "image": "simulated", "ports": ports}
        pod = self.core.create_namespaced_pod(
            namespace,
            {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": node, "containers": [container]}},
        )
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "conditions": [ready]}
        self.core.patch_namespaced_pod_status(name, namespace, {"status": status})
        return str(pod.metadata.uid)

    def _await_account(self, namespace: str) -> None:
        # A real API server refuses pods until a controller has made the namespace's default service account.
        deadline = time.monotonic() + 30
        while True:
            try:
                self.core.read_namespaced_service_account("default", namespace)
            except client.ApiException as error:
                if error.status != 404 or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

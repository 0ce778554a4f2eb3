"""A training job of a user on a real cluster, as its owner writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training_job import TRAINER_IMAGE

from perseus_core import keys
from perseus_sim.gpus.model import MODELS

TRAINING = "research"
PHYSICS = "what-the-gpus-do"
"""ConfigMap with time and energy of instructions on the simulated GPUs. Only the trainers read it."""
A100 = MODELS["a100"]
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
"""Label of a namespace."""
CONFINED = {
    "runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
"""What such a namespace demands of containers, and a file system that nobody writes to."""


@dataclass(frozen=True)
class Training:
    """A training job as its owner writes it. Only the label on its pods concerns Perseus."""

    name: str
    stages: int
    pipelines: int
    microbatches: int
    gpus_per_pod: int = 1

    @property
    def ranks(self) -> int:
        return self.stages * self.pipelines

    def indexed_job(self) -> list[dict[str, Any]]:
        """One pod for each rank."""
        pods = self.ranks // self.gpus_per_pod
        template = {"metadata": {"labels": {keys.LABEL_JOB: self.name}}, "spec": self._pod()}
        spec = {"completions": pods, "parallelism": pods, "completionMode": "Indexed", "template": template}
        return [self._service(), {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._named(), "spec": spec}]

    def unmodified_job(self) -> list[dict[str, Any]]:
        """The same without a word of ours, for a namespace with a class."""
        service, job = self.indexed_job()
        service["spec"]["selector"] = {"batch.kubernetes.io/job-name": self.name}
        job["spec"]["template"]["metadata"] = {"labels": {"app": self.name}}
        return [service, job]

    def plain_pods(self) -> list[dict[str, Any]]:
        """Pods with several ranks each, as torchrun is often started with one pod for each node."""
        pods = []
        for number in range(self.ranks // self.gpus_per_pod):
            name = f"{self.name}-{number}"
            rank = {"name": "NODE_RANK", "value": str(number)}
            metadata = {**self._named(), "name": name, "labels": {keys.LABEL_JOB: self.name}}
            spec = {**self._pod(rank), "hostname": name}
            pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return [self._service(), *pods]

    def perseus_job(self, **spec: Any) -> dict[str, Any]:
        pipeline = {
            "schedule": "1F1B", "stages": self.stages, "microbatches": self.microbatches, "dataParallel": self.pipelines
        }  # fmt: skip
        version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        return {
            "apiVersion": version, "kind": keys.KIND, "metadata": self._named(), "spec": {"pipeline": pipeline, **spec}
        }  # fmt: skip

    def _named(self) -> dict[str, Any]:
        return {"name": self.name, "namespace": TRAINING}

    def _service(self) -> dict[str, Any]:
        """The Service by which ranks find the first rank, as with every launcher."""
        spec = {"clusterIP": "None", "selector": {keys.LABEL_JOB: self.name}, "publishNotReadyAddresses": True}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._named(), "spec": spec}

    def _pod(self, *environment: dict[str, str]) -> dict[str, Any]:
        arguments = [
            f"--stages={self.stages}", f"--pipelines={self.pipelines}", f"--microbatches={self.microbatches}",
            f"--blocking-power={A100.blocking_power_w}", f"--profile=/physics/{self.name}.csv", "--report=0.5",
        ]  # fmt: skip
        first = {"name": "MASTER_ADDR", "value": f"{self.name}-0.{self.name}.{TRAINING}.svc.cluster.local"}
        container = {
            "name": "trainer",
            "image": TRAINER_IMAGE,
            "args": arguments,
            "env": [first, *environment],
            "resources": {"requests": {"cpu": "100m"}, "limits": {"nvidia.com/gpu": str(self.gpus_per_pod)}},
            "volumeMounts": [{"name": "physics", "mountPath": "/physics"}],
            "securityContext": CONFINED,
        }
        return {
            "subdomain": self.name,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 8,
            "containers": [container],
            "volumes": [{"name": "physics", "configMap": {"name": PHYSICS}}],
        }

"""The PerseusJob of one node and its training pod, as the tests of an installation make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kubernetes import client
from outside_gpu import GPUS, Gpu

from local_cluster.machine import Machine
from perseus_core import keys
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.nvml_shim import ShimError
from perseus_sim.gpus.shim_gpu import NoGpus, ShimGpus
from perseus_sim.profiles import profile_csv

TRAINING = "training"
"""The namespace."""
STAGES, PIPELINES, MICROBATCHES = 2, 2, 4
PROFILE = profile_csv(stages=STAGES, imbalance=1.2, forward_s=0.02)
TRAINER_IMAGE = "perseus-trainer:0.1.0"
FAST_CLOCK = "run/perseus/fast_clock.so"
"""Agents and trainers that start on a node with this library have a wrong clock; see ``faults.set_clock_ahead``."""
PRELOAD = {"LD_PRELOAD": f"/{FAST_CLOCK}"}


@dataclass
class Job:
    """The PerseusJob of one node, and its training pod, which has a second container without GPUs."""

    name: str
    node: Machine
    api: Any
    kubectl: Callable[..., str]
    gpus: list[Gpu] = field(default_factory=list)
    spare: list[Gpu] = field(default_factory=list)
    """GPUs of its node that no job has."""

    @property
    def resource(self) -> tuple[str, str, str, str, str]:
        return keys.API_GROUP, keys.API_VERSION, TRAINING, keys.PLURAL, self.name

    def manifest(self) -> dict[str, Any]:
        pipeline = {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": PIPELINES}
        blocking_power = round(1000 * MODELS["a100"].blocking_power_w)
        return {
            "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
            "kind": keys.KIND,
            "metadata": {"name": self.name},
            "spec": {
                "pipeline": pipeline,
                "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": blocking_power},
                "objective": {"type": "MinEnergy"},
                "straggler": {"mode": "Ignore"},
                "baselineIterations": 0,
                "comparison": {"everyIterations": 0},  # at default clocks, which tests look for
                "points": 20,
            },
        }

    def pod(self) -> dict[str, Any]:
        arguments = [
            f"--stages={STAGES}",
            f"--pipelines={PIPELINES}",
            f"--microbatches={MICROBATCHES}",
            f"--blocking-power={MODELS['a100'].blocking_power_w}",
            "--profile=/profile/profile.csv",
            "--report=0.5",
            "--noise=0.005",  # iterations differ in time, so that a new measurement has a new value
        ]
        mounts = [
            {"name": "perseus", "mountPath": "/run/perseus", "readOnly": True},
            {"name": "profile", "mountPath": "/profile"},
        ]
        container = {
            "name": "trainer",
            "image": TRAINER_IMAGE,
            "args": arguments,
            "env": [
                {"name": name, "value": value}
                for name, value in {keys.ENV_SOCKET: "/run/perseus/agent.sock", **PRELOAD}.items()
            ],
            "resources": {"limits": {"nvidia.com/gpu": str(STAGES * PIPELINES)}},
            "volumeMounts": mounts,
        }
        sidecar = {
            "name": "sidecar",
            "image": TRAINER_IMAGE,
            "command": ["sleep", "inf"],
            "volumeMounts": [{"name": "perseus", "mountPath": "/run/perseus"}],
        }
        return {
            "metadata": {"name": self.name, "labels": {keys.LABEL_JOB: self.name}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": self.node.name},
                "restartPolicy": "Always",
                "terminationGracePeriodSeconds": 2,
                "automountServiceAccountToken": False,
                "containers": [container, sidecar],
                "volumes": [
                    {"name": "perseus", "hostPath": {"path": "/run/perseus", "type": "DirectoryOrCreate"}},
                    {"name": "profile", "configMap": {"name": "profile"}},
                ],
            },
        }

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = client.CustomObjectsApi(self.api).get_namespaced_custom_object(*self.resource)
        return dict(found.get("status") or {})

    def in_force(self) -> bool:
        found = {c["type"]: (c["status"], c["reason"]) for c in self.status().get("conditions", ())}
        return found.get("PlanApplied") == ("True", "PlanInForce")

    def progress(self) -> str:
        """Return the trainer's last line about iterations, from the node's disk, which no fault can cut off."""
        logs = self.node.folder.glob(f"log/pods/{TRAINING}_{self.name}_*/trainer/*")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if "iteration" in line]
        return max(lines, default="")  # lines begin with the time

    def run(self, container: str, *command: str) -> str:
        """Run a command in a container of the pod and return its output."""
        return self.kubectl("-n", TRAINING, "exec", self.name, "-c", container, "--", *command)

    def open_gpus(self) -> bool:
        """Find the GPUs of the node, the stage varying fastest; return whether the pod has got its own."""
        own = self.run("trainer", "printenv", "NVIDIA_VISIBLE_DEVICES").strip().split(",")
        folder = self.node.root / GPUS
        try:
            others = set(ShimGpus.read(folder).uuids) - set(own)
            self.gpus = [Gpu(folder, uuid, number % STAGES) for number, uuid in enumerate(sorted(own))]
            self.spare = [Gpu(folder, uuid, 0) for uuid in others]
        except (NoGpus, ShimError):
            return False
        return True

"""The product at work on a real cluster, for tests that then break something: chart, one job on each node, and a watch.

Used by the tests of faults and of identity. The watch reads every GPU of every node all the time, from outside
of the nodes, and remembers what no test may allow: a clock that is neither the plan's nor the default.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client

from local_cluster.cluster import Cluster
from local_cluster.machine import Machine, processes, running
from perseus_proto import keys
from perseus_sim.gpus.model import MODELS, profile_csv
from perseus_sim.gpus.nvml_shim import ShimError
from perseus_sim.gpus.shim_gpu import NodeGpus, NoGpus, describe, open_shim
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"
SYSTEM, TRAINING = "perseus-system", "training"
STAGES, PIPELINES, MICROBATCHES = 2, 2, 4
PROFILE = profile_csv(stages=STAGES, imbalance=1.2, forward_s=0.02)
PATIENCE_S = 240.0
LEASE_TTL_S = 15.0
"""Half of the default, so that less is waited for; the operator's longest wait for an agent fits into it five times."""
SPARE = 2
"""GPUs of a node that nobody may write to: no job has them."""
TRAINER_IMAGE = "perseus-trainer:0.1.0"
UNTIL_GONE = ("--cascade=foreground", "--wait")
"""Of helm: a namespace with pods on their way out is looked at again only after half of what these may take."""
GPUS = "run/perseus-simulated-gpus"
"""Of a node, under its root."""
FAST_CLOCK = "run/perseus/fast_clock.so"
"""Agents and trainers that start on a node with this library live in another hour; see ``faults.mislead``."""
PRELOAD = {"LD_PRELOAD": f"/{FAST_CLOCK}"}
VALUES = {
    "simulatedGpus": {"enabled": True, "count": STAGES * PIPELINES + SPARE},
    "agent": {"extraEnv": [{"name": name, "value": value} for name, value in PRELOAD.items()]},
    "operator": {
        "settings": {
            "leaseTtlS": LEASE_TTL_S,
            "agentPollS": 1.0,
            "statusIntervalS": 0.5,
            "calibrateAfter": 1_000_000,  # one plan from the first to the last fault
        }
    },
}
_LOOK_S = 0.02


class Gpu:
    """One GPU of a node, read from outside of the node."""

    def __init__(self, folder: Path, uuid: str, stage: int) -> None:
        self.uuid, self.stage = uuid, stage
        self._index = NodeGpus.read(folder).uuids.index(uuid)
        self._shim = open_shim(folder)
        self._resets = self._shim.get(self._index, "reset_calls")
        self.defaults: list[float] = []
        """When it was given its default clocks, on our clock."""

    @property
    def locked_mhz(self) -> int:
        """The clock that holds; 0: default."""
        return self._shim.get(self._index, "locked_mhz")

    def written(self) -> int:
        """How often it was written to."""
        return self._shim.get(self._index, "lock_calls") + self._shim.get(self._index, "reset_calls")

    def look(self) -> int:
        """The clock that holds now; remembers when it was given its default clocks, however briefly."""
        resets = self._shim.get(self._index, "reset_calls")
        if resets > self._resets:
            self.defaults.append(time.monotonic())
        self._resets = resets
        return self.locked_mhz

    def default_after(self, since: float) -> float | None:
        """How long after a time it was first given its default clocks; None: it was not."""
        return next((time - since for time in self.defaults if time >= since), None)


@dataclass
class Job:
    """The PerseusJob of one node, the pod that trains it, and in that pod a container that has no GPUs."""

    name: str
    node: Machine
    api: Any
    kubectl: Callable[..., str]
    gpus: list[Gpu] = field(default_factory=list)
    spare: list[Gpu] = field(default_factory=list)
    """Those of its node that it does not have."""

    @property
    def place(self) -> tuple[str, str, str, str, str]:
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
                "straggler": {"mode": "Off"},
                "baselineIterations": 0,
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
            "--noise=0.005",  # no two iterations take the same: what is measured anew is seen to be new
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
        found: dict[str, Any] = client.CustomObjectsApi(self.api).get_namespaced_custom_object(*self.place)
        return dict(found.get("status") or {})

    def in_force(self) -> bool:
        said = {c["type"]: (c["status"], c["reason"]) for c in self.status().get("conditions", ())}
        return said.get("PlanApplied") == ("True", "PlanInForce")

    def progress(self) -> str:
        """What the trainer last said of its iterations, from the node's disk: nothing between can be away."""
        logs = self.node.folder.glob(f"log/pods/{TRAINING}_{self.name}_*/trainer/*")
        said = [line for log in logs for line in log.read_text(errors="replace").splitlines() if "iteration" in line]
        return max(said, default="")  # lines begin with the time

    def run(self, container: str, *command: str) -> str:
        """Output of a command in its pod."""
        return self.kubectl("-n", TRAINING, "exec", self.name, "-c", container, "--", *command)

    def open_gpus(self) -> bool:
        """Find the GPUs of the node, as soon as the pod has its own of them, stages running fastest."""
        own = self.run("trainer", "printenv", "NVIDIA_VISIBLE_DEVICES").strip().split(",")
        folder = self.node.root / GPUS
        try:
            others = set(NodeGpus.read(folder).uuids) - set(own)
            self.gpus = [Gpu(folder, uuid, number % STAGES) for number, uuid in enumerate(sorted(own))]
            self.spare = [Gpu(folder, uuid, 0) for uuid in others]
        except (NoGpus, ShimError):
            return False
        return True


class Watch(threading.Thread):
    """Looks at every GPU all the time. ``wrong`` must stay empty."""

    def __init__(self, jobs: list[Job], allowed_mhz: dict[int, set[int]]) -> None:
        super().__init__(daemon=True)
        self.wrong: list[str] = []
        self._jobs, self._allowed, self._over = jobs, allowed_mhz, threading.Event()

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            for gpu in [gpu for job in self._jobs for gpu in job.gpus]:
                if (clock := gpu.look()) not in self._allowed[gpu.stage] | {0}:
                    self.wrong.append(f"{gpu.uuid} of stage {gpu.stage} was set to {clock} MHz")
            for gpu in [gpu for job in self._jobs for gpu in job.spare]:
                if clock := gpu.look():
                    self.wrong.append(f"{gpu.uuid}, which no job has, was set to {clock} MHz")

    def stop(self) -> None:
        self._over.set()
        self.join()


class Parting(threading.Thread):
    """Sees what an agent leaves: which GPUs of its node are locked when its process has ended.

    From outside of the node and at once, since whoever comes after it gives everything back, too.
    """

    def __init__(self, agent: Any, folder: Path) -> None:
        super().__init__(daemon=True)
        self._pids = find(agent, PROGRAMS["agent"])
        assert self._pids, "the agent runs"
        self._folder = folder
        self._kept: list[str] | None = None

    def run(self) -> None:
        while any(running(pid) for pid in self._pids):
            time.sleep(_LOOK_S)
        self._kept = [uuid for uuid, gpu in describe(self._folder).items() if gpu["locked_mhz"]]

    def kept(self) -> list[str]:
        """The GPUs that it did not give back, once it is gone."""
        self.join(PATIENCE_S)
        assert self._kept is not None, "the agent still runs"
        return self._kept


class Stage:
    """The chart installed, and one job in training on each node under its plan."""

    def __init__(
        self,
        cluster: Cluster,
        api: Any,
        helm: Callable[..., str],
        eventually: Callable[..., Any],
    ) -> None:
        self.cluster, self.api, self.eventually = cluster, api, eventually
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._helm = helm
        self.jobs = [Job(f"train-{node.name}", node, api, cluster.kubectl) for node in cluster.nodes]

    # Up and down

    def set(self) -> None:
        """Install, train, and wait until every plan is in force."""
        for name, level in ((SYSTEM, "privileged"), (TRAINING, "privileged")):
            labels = {"pod-security.kubernetes.io/enforce": level}
            self.core.create_namespace({"metadata": {"name": name, "labels": labels}})
        self._helm("install", "perseus", str(CHART), "--namespace", SYSTEM, *_flags(VALUES))
        self.core.create_namespaced_config_map(
            TRAINING, {"metadata": {"name": "profile"}, "data": {"profile.csv": PROFILE}}
        )
        self.eventually("the system is ready", self.system_ready, PATIENCE_S)
        for job in self.jobs:
            self.custom.create_namespaced_custom_object(*job.place[:-1], job.manifest())
            self.core.create_namespaced_pod(TRAINING, job.pod())
        for job in self.jobs:
            self.eventually("the GPUs are there", job.open_gpus)
        self.returned()

    @contextlib.contextmanager
    def standing(self) -> Iterator[Stage]:
        """Set for as long as the context lasts; struck also if it could not be set."""
        try:
            self.set()
            yield self
        finally:
            self.strike()

    def strike(self) -> None:
        """Delete the jobs, see every GPU at default, uninstall; also what was begun and came to nothing."""
        for job in self.jobs:
            with contextlib.suppress(client.ApiException):
                self.custom.delete_namespaced_custom_object(*job.place)
        gpus = [gpu for job in self.jobs for gpu in job.gpus]
        self.eventually("every GPU is at default", lambda: not any(gpu.locked_mhz for gpu in gpus))
        place = self.jobs[0].place[:-1]
        with contextlib.suppress(client.ApiException):
            self.custom.list_namespaced_custom_object(*place)
            self.eventually("the jobs are gone", lambda: not self.custom.list_namespaced_custom_object(*place)["items"])
        for job in self.jobs:
            with contextlib.suppress(client.ApiException):
                self.core.delete_namespaced_pod(job.name, TRAINING)
        self._helm("uninstall", "perseus", "--namespace", SYSTEM, "--ignore-not-found", *UNTIL_GONE)
        definitions = client.ApiextensionsV1Api(self.api)
        for plural in (keys.PLURAL, keys.BUDGET_PLURAL):
            with contextlib.suppress(client.ApiException):
                definitions.delete_custom_resource_definition(f"{plural}.{keys.API_GROUP}")
        for name in (TRAINING, SYSTEM):
            self.core.delete_namespace(name)
        names = lambda: {item.metadata.name for item in self.core.list_namespace().items}  # noqa: E731
        self.eventually("the namespaces are gone", lambda: not names() & {TRAINING, SYSTEM}, PATIENCE_S)

    def begin_anew(self, job: Job) -> None:
        """Put another pod in the place of a job's, as its controller would."""

        with contextlib.suppress(client.ApiException):  # nobody is there to delete
            self.core.delete_namespaced_pod(job.name, TRAINING, grace_period_seconds=0)
        make = lambda: self.core.create_namespaced_pod(TRAINING, job.pod())  # noqa: E731
        self.eventually("another pod is made, now that the old one has gone", make, PATIENCE_S)

    # What is so

    def allowed_mhz(self) -> dict[int, set[int]]:
        """Which clocks the plans in force have for each stage, from the frontiers that the operator keeps."""
        schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
        found: dict[int, set[int]] = {stage: set() for stage in range(STAGES)}
        for job in self.jobs:
            status = job.status()
            kept = self.core.read_namespaced_config_map(status["frontier"]["configMapName"], TRAINING)
            frontier = Frontier.from_bytes(b64decode(kept.binary_data["frontier"]))
            plan = frontier.frequencies_mhz[int(status["plan"]["point"])]
            for stage in found:
                own = slice(int(schedule.stage_offset[stage]), int(schedule.stage_offset[stage + 1]))
                found[stage] |= set(map(int, plan[own]))
        return found

    def system_ready(self) -> bool:
        """The operator, every agent and whatever simulates GPUs answer their probes."""
        pods = self.core.list_namespaced_pod(SYSTEM).items
        ready = [
            all(container.ready for container in pod.status.container_statuses or ())
            for pod in pods
            if pod.metadata.deletion_timestamp is None and pod.status.phase == "Running"
        ]
        return len(ready) == 2 * len(self.cluster.nodes) + 1 and all(ready)

    def whole(self) -> bool:
        """Every part of the cluster runs."""
        machines = (self.cluster.control_plane, *self.cluster.nodes)
        return all(machine.pid for machine in machines) and all(
            self.cluster.running(machine.name, part)
            for machine in machines
            for part in self.cluster.components(machine.name)
        )

    def figures(self) -> dict[str, Any]:
        """What the operator last measured of each job: it changes while operator, agent and trainer work together."""
        return {job.name: job.status().get("measured") for job in self.jobs}

    def returned(self) -> float:
        """Wait until every plan is in force, enforced on every GPU, and measured anew; returns how long that took."""
        begun = time.monotonic()
        for _ in range(2):  # what was measured before may still be on its way once
            before = self.eventually("the jobs are seen", self.figures, PATIENCE_S)

            def so(before: dict[str, Any] = before) -> bool:
                now = self.figures()
                return (
                    all(now[job.name] not in (None, before[job.name]) and job.in_force() for job in self.jobs)
                    and all(gpu.locked_mhz for job in self.jobs for gpu in job.gpus)
                    and self.system_ready()
                )

            self.eventually("every plan is in force again", so, PATIENCE_S)
        return time.monotonic() - begun

    def trains_on(self, jobs: list[Job] | None = None) -> None:
        """Wait until every job has come further."""
        for job in jobs or self.jobs:
            begun = job.progress()
            self.eventually(f"{job.name} trains on", lambda job=job, begun=begun: job.progress() > begun, PATIENCE_S)

    # Where the product's processes are

    def pod(self, component: str, node: Machine | None = None) -> Any:
        """The pod of the operator, or of a node's agent."""
        selector = f"app.kubernetes.io/component=perseus-{component}"
        pods = self.core.list_namespaced_pod(SYSTEM, label_selector=selector).items
        living = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
        there = [pod for pod in living if node is None or pod.spec.node_name == node.name]
        assert there, f"no {component} on {node.name if node else 'any node'}"
        return there[0]

    def cast(self) -> dict[str, Any]:
        """Every pod of ours by role, as of now: they can be found while the API server is away."""
        found = {"operator": self.pod("operator")}
        for job in self.jobs:
            found[f"agent of {job.node.name}"] = self.pod("agent", job.node)
            found[f"trainer of {job.node.name}"] = self.core.read_namespaced_pod(job.name, TRAINING)
        return found


PROGRAMS = {"operator": "perseus-operator", "agent": "perseus-agent", "trainer": "perseus_sim.training.pod_job"}
"""What each role runs, by a word of its command line."""


def _flags(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]


def find(pod: Any, word: str) -> list[int]:
    """The processes of a pod whose command line has a word, as this machine numbers them."""
    return [
        pid
        for pid, arguments in processes()
        if any(word in argument for argument in arguments[:5]) and f"pod{pod.metadata.uid}" in group_of(pid)
    ]


def group_of(pid: int) -> str:
    """The control groups of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""

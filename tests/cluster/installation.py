"""The product on a real cluster, for tests that then break something: the chart, one job on each node, and a watch.

The watch reads every GPU of every node all the time, from outside the nodes. It records every clock that is neither the
plan's nor the default; no test may cause one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kubernetes import client
from training_job import MICROBATCHES, PIPELINES, PRELOAD, PROFILE, STAGES, TRAINING, Job
from urllib3.exceptions import HTTPError

from local_cluster.cluster import Cluster
from local_cluster.machine import Machine, processes, running
from perseus_core import keys
from perseus_sim.gpus.shim_gpu import describe
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"
SYSTEM = "perseus-system"
PATIENCE_S = 240.0
LEASE_TTL_S = 15.0
"""Half of the default, so that tests wait less. It is five times the operator's longest wait for an agent."""
SPARE = 2
"""Number of GPUs of a node that no job has, and to which nothing may write."""
UNTIL_GONE = ("--cascade=foreground", "--wait")
"""Flags of ``helm uninstall``. Without them a namespace with terminating pods is deleted much later, because Kubernetes
checks it again only after half of the pods' grace period."""
VALUES = {
    "simulatedGpus": {"enabled": True, "count": STAGES * PIPELINES + SPARE},
    "agent": {
        "settings": {"gpuMetrics": True},
        "extraEnv": [{"name": name, "value": value} for name, value in PRELOAD.items()],
    },
    "operator": {
        "settings": {
            "leaseTtlS": LEASE_TTL_S,
            "agentPollS": 1.0,
            "statusIntervalS": 0.5,
            "calibrateAfter": 1_000_000,  # no calibration, so that the plan stays the same
        }
    },
}
_METRICS = (
    "import urllib.request; "
    f"print(urllib.request.urlopen('http://localhost:{keys.DEFAULT_AGENT_METRICS_PORT}/metrics').read().decode())"
)
_LOOK_S = 0.02
_PLANS_EVERY = 25


class Plans:
    """The clocks of every plan that was in force since it began to look, by stage.

    Plans are made again for hardware that was measured better, so one look is not enough.
    """

    def __init__(self, in_force: Callable[[], dict[int, set[int]]]) -> None:
        self._in_force = in_force
        self._seen: dict[int, set[int]] = {stage: set() for stage in range(STAGES)}

    def look(self) -> None:
        """Add the plans in force now, if the API server answers."""
        with contextlib.suppress(KeyError, OSError, client.ApiException, HTTPError):
            for stage, clocks in self._in_force().items():
                self._seen[stage] |= clocks

    def has(self, stage: int, clock_mhz: int) -> bool:
        """Whether a plan has a clock for a stage."""
        return clock_mhz in self._seen[stage]


class Watch(threading.Thread):
    """Reads every GPU all the time. ``wrong`` must stay empty."""

    def __init__(self, jobs: list[Job], plans: Plans) -> None:
        super().__init__(daemon=True)
        self._jobs, self._plans, self._stopped = jobs, plans, threading.Event()
        self._set: set[tuple[str, int, int]] = set()
        self._spare: list[str] = []

    def run(self) -> None:
        for turn in itertools.count():
            if self._stopped.wait(_LOOK_S):
                return
            if turn % _PLANS_EVERY == 0:  # a plan may be made, and made again, while nobody else looks
                self._plans.look()
            for gpu in [gpu for job in self._jobs for gpu in job.gpus]:
                if clock := gpu.look():
                    self._set.add((gpu.uuid, gpu.stage, clock))
            for gpu in [gpu for job in self._jobs for gpu in job.spare]:
                if clock := gpu.look():
                    self._spare.append(f"{gpu.uuid}, which no job has, was set to {clock} MHz")

    @property
    def wrong(self) -> list[str]:
        """Every clock that a GPU had and that is neither its plan's nor the default."""
        self._plans.look()
        strays = [
            f"{uuid} of stage {stage} was set to {clock} MHz"
            for uuid, stage, clock in sorted(self._set)
            if not self._plans.has(stage, clock)
        ]
        return strays + self._spare

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class AgentExit(threading.Thread):
    """Records which GPUs of a node are locked when the agent's process ends.

    It reads them from outside the node and at once, because the next agent resets their clocks too.
    """

    def __init__(self, agent: Any, folder: Path) -> None:
        super().__init__(daemon=True)
        self._pids = find(agent, PROGRAMS["agent"])
        assert self._pids, "the agent runs"
        self._folder = folder
        self._left: list[str] | None = None

    def run(self) -> None:
        while any(running(pid) for pid in self._pids):
            time.sleep(_LOOK_S)
        self._left = [uuid for uuid, gpu in describe(self._folder).items() if gpu["locked_mhz"]]

    def left_locked(self) -> list[str]:
        """Wait until the agent has ended; return the GPUs whose clocks it did not reset."""
        self.join(PATIENCE_S)
        assert self._left is not None, "the agent still runs"
        return self._left


class Installation:
    """The installed chart, and on each node one training job that runs its plan."""

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
        self.plans = Plans(self.allowed_mhz)
        self.replicas = 1
        """Of the operator."""

    # Install and uninstall

    def install(self) -> None:
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
            self.custom.create_namespaced_custom_object(*job.resource[:-1], job.manifest())
            self.core.create_namespaced_pod(TRAINING, job.pod())
        for job in self.jobs:
            self.eventually("the GPUs are there", job.open_gpus)
        self.wait_for_plans()

    def scale(self, replicas: int) -> None:
        """Upgrade to another number of replicas of the operator, and wait until they are ready."""
        self.replicas = replicas
        flags = ("--reuse-values", "--set", f"operator.replicas={replicas}")
        self._helm("upgrade", "perseus", str(CHART), "--namespace", SYSTEM, *flags)
        self.eventually(f"{replicas} operators are ready", self.system_ready, PATIENCE_S)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Installation]:
        """Keep the product installed during the context; a failed installation is uninstalled too."""
        try:
            self.install()
            yield self
        finally:
            self.uninstall()

    def uninstall(self) -> None:
        """Delete the jobs, wait until every GPU is at default clocks, and uninstall."""
        for job in self.jobs:
            with contextlib.suppress(client.ApiException):
                self.custom.delete_namespaced_custom_object(*job.resource)
        gpus = [gpu for job in self.jobs for gpu in job.gpus]
        self.eventually("every GPU is at default", lambda: not any(gpu.locked_mhz for gpu in gpus))
        resource = self.jobs[0].resource[:-1]
        with contextlib.suppress(client.ApiException):
            self.custom.list_namespaced_custom_object(*resource)
            jobs = lambda: self.custom.list_namespaced_custom_object(*resource)["items"]  # noqa: E731
            self.eventually("the jobs are gone", lambda: not jobs())
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

    def replace_pod(self, job: Job) -> None:
        """Replace a job's pod by a new one, as its controller would."""
        with contextlib.suppress(client.ApiException):  # the pod does not exist
            self.core.delete_namespaced_pod(job.name, TRAINING, grace_period_seconds=0)
        make = lambda: self.core.create_namespaced_pod(TRAINING, job.pod())  # noqa: E731
        self.eventually("the new pod is made, after the old one is gone", make, PATIENCE_S)

    # The state of the product

    def allowed_mhz(self) -> dict[int, set[int]]:
        """Return the clocks that the plans in force have for each stage, from the frontiers in the cluster."""
        schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
        found: dict[int, set[int]] = {stage: set() for stage in range(STAGES)}
        for job in self.jobs:
            status = job.status()
            where = keys.API_GROUP, keys.API_VERSION, TRAINING, keys.FRONTIER_PLURAL, job.name
            stored: Any = self.custom.get_namespaced_custom_object(*where)
            frontier = Frontier.from_bytes(b64decode(stored["spec"]["data"]))
            plan = frontier.frequencies_mhz[int(status["plan"]["point"])]
            for stage in found:
                own = slice(int(schedule.stage_offset[stage]), int(schedule.stage_offset[stage + 1]))
                found[stage] |= set(map(int, plan[own]))
        return found

    def system_ready(self) -> bool:
        """Return whether the operator, every agent and every GPU simulator are ready."""
        pods = self.core.list_namespaced_pod(SYSTEM).items
        ready = [
            all(
                each.ready
                for each in (pod.status.init_container_statuses or []) + (pod.status.container_statuses or [])
            )
            for pod in pods
            if pod.metadata.deletion_timestamp is None and pod.status.phase == "Running"
        ]
        return len(ready) == 2 * len(self.cluster.nodes) + self.replicas and all(ready)

    def keepers_watch(self) -> bool:
        """Return whether every agent says that a clock keeper watches it."""
        pods = [self.pod("agent", job.node).metadata.name for job in self.jobs]
        pages = [self.cluster.kubectl("-n", SYSTEM, "exec", pod, "--", "python", "-c", _METRICS) for pod in pods]
        found = [re.findall(r"^perseus_agent_keeper_watches\{.*\} (.*)$", page, re.MULTILINE) for page in pages]
        return found == [["1.0"]] * len(pods)

    def all_parts_run(self) -> bool:
        """Return whether every part of the cluster runs."""
        machines = (self.cluster.control_plane, *self.cluster.nodes)
        return all(machine.pid for machine in machines) and all(
            self.cluster.running(machine.name, part)
            for machine in machines
            for part in self.cluster.components(machine.name)
        )

    def measurements(self) -> dict[str, Any]:
        """Return each job's last measurement. It changes only while operator, agent and trainer all work."""
        return {job.name: job.status().get("measured") for job in self.jobs}

    def wait_for_plans(self) -> float:
        """Wait until every plan is in force, set on every GPU, and measured again; return the seconds."""
        begun = time.monotonic()
        for _ in range(2):  # the first new value may be an older measurement that arrives late
            before = self.eventually("the jobs can be read", self.measurements, PATIENCE_S)

            def measured_again(before: dict[str, Any] = before) -> bool:
                now = self.measurements()
                self.plans.look()
                return (
                    all(now[job.name] not in (None, before[job.name]) and job.in_force() for job in self.jobs)
                    and all(gpu.locked_mhz for job in self.jobs for gpu in job.gpus)
                    and self.system_ready()
                )

            self.eventually("every plan is in force again", measured_again, PATIENCE_S)
        took_s = time.monotonic() - begun
        self.eventually("every keeper watches", self.keepers_watch, PATIENCE_S)
        return took_s

    def trains_on(self, jobs: list[Job] | None = None) -> None:
        """Wait until every job has completed another iteration."""
        for job in jobs or self.jobs:
            begun = job.progress()
            self.eventually(f"{job.name} trains on", lambda job=job, begun=begun: job.progress() > begun, PATIENCE_S)

    # The product's pods and processes

    def pod(self, component: str, node: Machine | None = None) -> Any:
        """Return the pod of the operator, or of a node's agent."""
        selector = f"app.kubernetes.io/component=perseus-{component}"
        pods = self.core.list_namespaced_pod(SYSTEM, label_selector=selector).items
        running = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
        found = [pod for pod in running if node is None or pod.spec.node_name == node.name]
        assert found, f"no {component} on {node.name if node else 'any node'}"
        return found[0]

    def operators(self) -> list[Any]:
        """Return the pods of all replicas of the operator."""
        selector = "app.kubernetes.io/component=perseus-operator"
        pods = self.core.list_namespaced_pod(SYSTEM, label_selector=selector).items
        return [pod for pod in pods if pod.metadata.deletion_timestamp is None]

    def pods_by_role(self) -> dict[str, Any]:
        """Return the current pods by role. With them, processes can be found while the API server is down."""
        found = {"operator": self.pod("operator")}
        for job in self.jobs:
            found[f"agent of {job.node.name}"] = found[f"keeper of {job.node.name}"] = self.pod("agent", job.node)
            found[f"trainer of {job.node.name}"] = self.core.read_namespaced_pod(job.name, TRAINING)
        return found

    def restarts(self, pod: Any) -> int:
        """Return how often the first container of a pod was restarted."""
        found = self.core.read_namespaced_pod(pod.metadata.name, SYSTEM)
        return int(found.status.container_statuses[0].restart_count)

    def operator_first(self) -> list[Job]:
        """Return the jobs, with the job on the operator's node first."""
        node = self.pod("operator").spec.node_name
        return sorted(self.jobs, key=lambda job: job.node.name != node)

    def freed_after(self, job: Job, since: float) -> float:
        """Wait until every GPU of a job was reset to default clocks; return the seconds until the last one was."""

        def freed() -> list[float] | None:
            times = [gpu.default_after(since) for gpu in job.gpus]
            return [time for time in times if time is not None] if None not in times else None

        return max(self.eventually("every GPU is reset to default clocks", freed, PATIENCE_S))


PROGRAMS = {
    "operator": "perseus-operator",
    "keeper": "perseus-agent keep ",
    "agent": "perseus-agent --",
    "trainer": "perseus_sim.training.pod_job",
}
"""The program of each role, by a part of its command line."""


def _flags(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]


def find(pod: Any, part: str) -> list[int]:
    """Return the processes of a pod that have this in their command line, by their numbers on this machine."""
    return [
        pid
        for pid, arguments in processes()
        if part in " ".join(arguments[:5]) and f"pod{pod.metadata.uid}" in group_of(pid)
    ]


def group_of(pid: int) -> str:
    """Return the control groups of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""

"""What a user of a real cluster does and sees: helm and kubectl outward, the simulated GPUs read beside them.

Used by ``test_journey``. Whatever is done is said as it is done, so that ``pytest -s`` tells the whole way as a story.
What is true of a GPU is read from the simulated driver on its node, from outside of every pod: never from the product.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

import yaml
from kubernetes import client
from stage import GPUS, PATIENCE_S, SYSTEM, TRAINER_IMAGE, UNTIL_GONE, Parting

from local_cluster.cluster import Cluster
from local_cluster.errors import ClusterError
from perseus_proto import keys
from perseus_sim.cluster import rbac
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.shim_gpu import describe
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

AGENTS = "perseus-agents"
"""Namespace of agents and GPU simulators alone; the operator's enforces the standard *restricted*."""
TRAINING = "research"
PHYSICS = "what-the-gpus-do"
"""ConfigMap with what instructions take on the simulated GPUs. For trainers: the product is not told."""
A100 = MODELS["a100"]


@dataclass(frozen=True)
class Training:
    """A training job as its owner writes it. Nothing of Perseus is in it but the label on its pods."""

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

    def plain_pods(self) -> list[dict[str, Any]]:
        """Several ranks in each, as torchrun is often started: one pod for each node."""
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
        """By which ranks find the first of them, as with every launcher."""
        spec = {"clusterIP": "None", "selector": {keys.LABEL_JOB: self.name}, "publishNotReadyAddresses": True}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._named(), "spec": spec}

    def _pod(self, *environment: dict[str, str]) -> dict[str, Any]:
        arguments = [
            f"--stages={self.stages}", f"--pipelines={self.pipelines}", f"--microbatches={self.microbatches}",
            f"--blocking-power={A100.blocking_power_w}", f"--profile=/physics/{self.name}.csv", "--report=0.5",
        ]  # fmt: skip
        first = {"name": "MASTER_ADDR", "value": f"{self.name}-0.{self.name}.{TRAINING}.svc.cluster.local"}
        confined = {
            "runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        container = {
            "name": "trainer",
            "image": TRAINER_IMAGE,
            "args": arguments,
            "env": [first, *environment],
            "resources": {"requests": {"cpu": "100m"}, "limits": {"nvidia.com/gpu": str(self.gpus_per_pod)}},
            "volumeMounts": [{"name": "physics", "mountPath": "/physics"}],
            "securityContext": confined,
        }
        return {
            "subdomain": self.name,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 8,
            "containers": [container],
            "volumes": [{"name": "physics", "configMap": {"name": PHYSICS}}],
        }


class Journey:
    """One user on one cluster."""

    def __init__(self, cluster: Cluster, api: Any, helm: Callable[..., str], eventually: Callable[..., Any]) -> None:
        self.cluster, self.eventually = cluster, eventually
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.begun_s, self.audited = time.time(), cluster.audit_log.stat().st_size
        self.failed = False
        """Whether a chapter has failed."""
        self.full_j = 0.0
        """Energy of an iteration at default clocks."""
        self._helm = helm

    # What is done

    def say(self, words: str) -> None:
        print(f"{time.time() - self.begun_s:5.0f} s  {words}", flush=True)

    def show(self, what: str, said: str) -> str:
        """What a command has printed, as the user sees it."""
        self.say("\n".join([f"$ {what}", *(f"        {line}" for line in said.strip().splitlines())]))
        return said

    def helm(self, *arguments: str) -> str:
        self.say(f"$ helm {' '.join(os.path.relpath(word) if word[:1] == '/' else word for word in arguments)}")
        return self._helm(*arguments)

    def kubectl(self, *arguments: str, stdin: Any = None) -> str:
        return self.cluster.kubectl(*arguments, stdin="" if stdin is None else yaml.safe_dump_all(stdin))

    def read(self, *arguments: str) -> Any:
        return json.loads(self.kubectl(*arguments, "--output=json"))

    def warnings(self, *arguments: str) -> str:
        """What the API server warns of as kubectl asks for something."""
        command = [str(self.cluster.assets / "kubectl"), f"--kubeconfig={self.cluster.kubeconfig}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def apply(self, *documents: dict[str, Any]) -> None:
        """Of one's own manifests, as they are."""
        named = ", ".join(f"{document['kind']} {document['metadata']['name']}" for document in documents[-1:])
        self.say(f"$ kubectl apply -f -      # {named}{' and its Service' if len(documents) == 2 else ''}")
        self.kubectl("apply", "-f", "-", stdin=documents)

    def plugin(self, *arguments: str) -> str:
        """kubectl perseus."""
        command = [str(Path(sys.executable).parent / "kubectl-perseus"), *arguments, "--namespace", TRAINING]
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "COLUMNS": "110"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return self.show(f"kubectl perseus {' '.join(arguments)}", ran.stdout)

    def rolled_out(self, *workloads: str) -> None:
        for workload in workloads:
            place = AGENTS if workload.startswith("daemonset/") else SYSTEM
            said = self.kubectl("-n", place, "rollout", "status", workload, f"--timeout={PATIENCE_S:.0f}s")
            self.say(said.strip().splitlines()[-1])

    # What the product says

    def pods(self, component: str) -> list[Any]:
        """Those of a component that are not on their way out."""
        selector = f"app.kubernetes.io/component=perseus-{component}"
        found = self.core.list_pod_for_all_namespaces(label_selector=selector).items
        return [pod for pod in found if pod.metadata.deletion_timestamp is None]

    def status(self, job: Training) -> dict[str, Any]:
        place = (keys.API_GROUP, keys.API_VERSION, TRAINING, keys.PLURAL, job.name)
        return dict(self.custom.get_namespaced_custom_object(*place).get("status") or {})

    def condition(self, job: Training, kind: str) -> tuple[str, str, str]:
        """Status, reason and message."""
        for said in self.status(job).get("conditions", ()):
            if said["type"] == kind:
                return said["status"], said["reason"], said["message"]
        return "Unknown", "", ""

    def in_force(self, job: Training) -> bool:
        return self.condition(job, "PlanApplied")[0] == "True" and "plan" in self.status(job)

    def slowdown(self, job: Training) -> float:
        """By how much the plan is slower than the fastest, on purpose."""
        return float(self.status(job)["plan"]["plannedSlowdown"].rstrip("%")) / 100

    def plan_mhz(self, job: Training) -> list[list[set[int]]]:
        """The clocks of the plan in force, by pipeline and stage, from the frontier that is kept in the cluster."""
        status = self.status(job)
        kept = self.core.read_namespaced_config_map(status["frontier"]["configMapName"], TRAINING)
        frontier = Frontier.from_bytes(b64decode(kept.binary_data["frontier"]))
        own = {each["dataParallelRank"]: each["point"] for each in status.get("stragglers", ())}
        schedule = build_schedule("1f1b", stages=job.stages, microbatches=job.microbatches)
        first = [int(offset) for offset in schedule.stage_offset]
        plans = [frontier.frequencies_mhz[int(own.get(p, status["plan"]["point"]))] for p in range(job.pipelines)]
        return [[set(map(int, plan[first[s] : first[s + 1]])) for s in range(job.stages)] for plan in plans]

    def rights(self, account: str) -> set[rbac.Permission]:
        """What the cluster allows a service account of the release, by whichever role."""
        bound = [
            item
            for kind in ("clusterrolebindings", "rolebindings")
            for item in self.read("get", kind, "--all-namespaces")["items"]
            if {"kind": "ServiceAccount", "name": account, "namespace": SYSTEM} in item.get("subjects", ())
        ]
        roles = {
            (each["roleRef"]["kind"], each["roleRef"]["name"], each["metadata"].get("namespace")) for each in bound
        }
        return rbac.granted(
            self.read("get", kind, name, *(("--namespace", namespace) if namespace else ()))
            for kind, name, namespace in roles
        )

    def ranks_by_gpu(self) -> dict[str, tuple[int, int]]:
        """Pipeline and stage of the rank on each GPU, as the agents identified it."""
        found = {}
        for pod in self.pods("agent"):
            name = f"{pod.metadata.name}:{keys.DEFAULT_AGENT_METRICS_PORT}"
            page = self.kubectl("get", "--raw", f"/api/v1/namespaces/{AGENTS}/pods/{name}/proxy/metrics")
            for line in page.splitlines():
                if line.startswith("perseus_gpu_rank_info{"):
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                    found[labels["gpu"]] = int(labels["dp"]), int(labels["stage"])
        return found

    # What is so

    def gpus(self) -> dict[str, dict[str, int]]:
        """Every simulated GPU of the cluster by UUID, as its driver has it."""
        found: dict[str, dict[str, int]] = {}
        for node in self.cluster.nodes:
            found |= describe(node.root / GPUS)
        return found

    def locked(self) -> list[str]:
        """The GPUs that are not at their default clocks."""
        return sorted(uuid for uuid, gpu in self.gpus().items() if gpu["locked_mhz"])

    def partings(self) -> list[Parting]:
        """What will be seen of each node's GPUs when its agent goes."""
        folders = {node.name: node.root / GPUS for node in self.cluster.nodes}
        found = [Parting(pod, folders[pod.spec.node_name]) for pod in self.pods("agent")]
        for each in found:
            each.start()
        return found

    def training_pods(self, job: Training) -> list[Any]:
        return list(self.core.list_namespaced_pod(TRAINING, label_selector=f"{keys.LABEL_JOB}={job.name}").items)

    def log(self, job: Training) -> str:
        """What the first rank's pod has printed: it reports what iterations take."""
        name = re.compile(rf"{job.name}-0(-|$)")
        first = next((pod.metadata.name for pod in self.training_pods(job) if name.match(pod.metadata.name)), None)
        return str(self.core.read_namespaced_pod_log(first, TRAINING)) if first else ""

    def iteration(self, job: Training) -> int:
        """The last that the trainers tell of; −1: none yet."""
        said = re.findall(r"iteration (\d+): ", self.log(job))
        return int(said[-1]) if said else -1

    def trains(self, job: Training, count: int) -> None:
        """Wait for so many more iterations."""
        last = self.iteration(job)
        self.eventually(f"{count} more iterations", lambda: self.iteration(job) >= last + count, PATIENCE_S)

    def joules(self, job: Training, iterations: int = 8) -> float:
        """Energy of an iteration on all GPUs, by their own counters: the line through what was seen while some passed.

        When exactly an iteration ended is not seen, so the ends of that time alone would not do.
        """
        numbers: list[float] = []
        energies: list[float] = []

        def over() -> bool:
            numbers.append(self.iteration(job))
            energies.append(sum(gpu["energy_mj"] for gpu in self.gpus().values()) / 1000)
            return numbers[-1] >= numbers[0] + iterations

        self.eventually(f"{iterations} more iterations", over, PATIENCE_S)
        return linear_regression(numbers, energies).slope

    # What takes several of them

    def follow(self, job: Training, condition: str) -> None:
        """Wait for a condition, and tell what the job says meanwhile."""
        told: list[str] = []

        def so() -> bool:
            for kind in ("ProfileReady", "FrontierReady", condition):
                status, reason, message = self.condition(job, kind)
                news = message.partition(":")[0]
                if message and news not in told:
                    told.append(news)
                    self.say(f"{kind} {status}, {reason}: {message}")
            return self.in_force(job)

        self.eventually(f"{condition} of {job.name}", so, PATIENCE_S)

    def slowed_for(self, job: Training, straggler: str) -> str:
        """Wait until a straggler is there and the others run slower on purpose; returns what is said of it."""

        def so() -> str:
            status, _, message = self.condition(job, "StragglerDetected")
            assert status == "True", message
            assert message.startswith(straggler), message
            assert self.in_force(job), self.condition(job, "PlanApplied")
            assert self.slowdown(job) > 0.1, self.status(job)["plan"]
            return message

        said = str(self.eventually(f"the straggler: {straggler} …", so, PATIENCE_S))
        self.say(said)
        self.clocks_are_the_plans(job)
        return said

    def fast_again(self, job: Training) -> None:
        """Wait until nothing slows a job on purpose any more."""

        def so() -> bool:
            status, _, message = self.condition(job, "StragglerDetected")
            assert status == "False", message
            assert self.in_force(job), self.condition(job, "PlanApplied")
            assert self.slowdown(job) < 0.05, self.status(job)["plan"]
            return True

        self.eventually("the plan is the fast one again", so, PATIENCE_S)
        self.say("it is over, and the plan is the fast one again")
        self.clocks_are_the_plans(job)

    def clocks_are_the_plans(self, job: Training) -> None:
        """Several times in a row, every GPU's clock is one that the plan has for the stage that computes on it."""

        def so() -> set[int]:
            stage_of, plans = self.ranks_by_gpu(), self.plan_mhz(job)
            assert len(stage_of) == job.ranks
            seen = set()
            for _ in range(5):
                gpus = self.gpus()
                for uuid, (pipeline, stage) in stage_of.items():
                    clock = gpus[uuid]["locked_mhz"] or gpus[uuid]["max_mhz"]
                    assert clock in plans[pipeline][stage], (uuid, gpus[uuid], plans[pipeline][stage])
                    seen.add(clock)
                time.sleep(0.2)
            # A plan begins with an iteration: until then all are at the highest clock, which each stage may have in it.
            assert len(seen) > 1, f"one clock for all is no plan: {seen}"
            return seen

        seen = self.eventually("every clock is the plan's", so, PATIENCE_S)
        self.say(f"read back from the {job.ranks} GPUs: each is at a clock of its plan, {min(seen)} to {max(seen)} MHz")

    def poke(self, uuid: str, *values: str) -> None:
        """Let something happen to a GPU, from within the pod that simulates it."""
        node = next(node.name for node in self.cluster.nodes if uuid in describe(node.root / GPUS))
        pod = next(pod.metadata.name for pod in self.pods("gpu-sim") if pod.spec.node_name == node)
        command = ("python", "-m", "perseus_sim.gpus.shim_gpu", uuid, *values)
        self.say(f"$ kubectl -n {AGENTS} exec {pod} -- {' '.join(command)}")
        self.kubectl("-n", AGENTS, "exec", pod, "--", *command)

    # Before and after

    def left(self) -> set[str]:
        """What of a release there is: objects of its namespaces, and those of no namespace that bear its name."""
        found: set[str] = set()
        for kind in _CLUSTER_WIDE:
            found |= {name for name in self.kubectl("get", kind, "-o", "name").split() if "perseus" in name}
        for kind in _NAMESPACED:
            for place in (SYSTEM, AGENTS):
                found |= set(self.kubectl("-n", place, "get", kind, "-o", "name", "--ignore-not-found").split())
        return {_short(name) for name in found} - {"configmap/kube-root-ca.crt", "serviceaccount/default"}

    def clear(self) -> None:
        """Take everything away, in whatever state it is."""
        crds = [name for name in self.left() if name.startswith("customresourcedefinition/")]
        if f"customresourcedefinition/{keys.PLURAL}.{keys.API_GROUP}" in crds:
            with contextlib.suppress(ClusterError):  # without an operator nobody takes the finalizers off
                self.kubectl("delete", keys.PLURAL, "--all", "--all-namespaces", "--timeout=30s")
            for name in self.kubectl("get", keys.PLURAL, "-n", TRAINING, "-o", "name").split():
                self.kubectl("-n", TRAINING, "patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        self._helm("uninstall", "perseus", "--namespace", SYSTEM, "--ignore-not-found", *UNTIL_GONE)
        self.kubectl("delete", "namespace", TRAINING, SYSTEM, AGENTS, "--ignore-not-found", "--timeout=180s")
        if crds:
            self.kubectl("delete", *crds, "--ignore-not-found", "--timeout=60s")
        for node in self.cluster.nodes:  # GPUs stay hot, and stay locked, when those go who made them so
            node.run("rm", "-rf", f"/{GPUS}")


_CLUSTER_WIDE = ("crd", "clusterrole", "clusterrolebinding", "mutatingwebhookconfiguration", "priorityclass")
_NAMESPACED = (
    "pod", "secret", "service", "configmap", "role", "rolebinding", "serviceaccount", "daemonset", "deployment",
    "networkpolicy",
)  # fmt: skip


def _short(name: str) -> str:
    """Without the kind's group: as ``kubectl get`` takes it."""
    kind, _, rest = name.partition("/")
    return f"{kind.partition('.')[0]}/{rest}"

"""The actions of a user on a real cluster, with helm and kubectl, and what the user and the simulated GPUs show.

Every action is printed, so that ``pytest -s`` shows the whole journey. The state of a GPU is read from the simulated
driver on its node, outside of every pod, and never from the product.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression
from typing import Any

import yaml
from installation import CHART, PATIENCE_S, SYSTEM, UNTIL_GONE, AgentExit
from kubernetes import client
from monitoring import Prometheus
from outside_gpu import GPUS
from training import TRAINING, Training

from local_cluster.cluster import Cluster
from perseus_core import keys
from perseus_sim.cluster import rbac
from perseus_sim.gpus.shim_gpu import describe
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

AGENTS = "perseus-agents"
"""Namespace of only agents and GPU simulators; the operator's namespace enforces the standard *restricted*."""


class Journey:
    """One user on one cluster."""

    def __init__(self, cluster: Cluster, api: Any, helm: Callable[..., str], eventually: Callable[..., Any]) -> None:
        self.cluster, self.eventually = cluster, eventually
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.begun_s, self.audited = time.time(), cluster.audit_log.stat().st_size
        self.failed = False
        """Whether a chapter (a test of the journey) has failed."""
        self.full_j = 0.0
        """Energy of an iteration at default clocks."""
        self._helm = helm

    # Actions of the user

    def say(self, text: str) -> None:
        """Print one line of the journey."""
        print(f"{time.time() - self.begun_s:5.0f} s  {text}", flush=True)

    def show(self, command: str, output: str) -> str:
        """Print a command and its output, and return the output."""
        self.say("\n".join([f"$ {command}", *(f"        {line}" for line in output.strip().splitlines())]))
        return output

    def helm(self, *arguments: str) -> str:
        self.say(f"$ helm {' '.join(os.path.relpath(word) if word[:1] == '/' else word for word in arguments)}")
        return self._helm(*arguments)

    def kubectl(self, *arguments: str, stdin: Any = None) -> str:
        return self.cluster.kubectl(*arguments, stdin="" if stdin is None else yaml.safe_dump_all(stdin))

    def read(self, *arguments: str) -> Any:
        return json.loads(self.kubectl(*arguments, "--output=json"))

    def warnings(self, *arguments: str) -> str:
        """Run kubectl and return the warnings of the API server."""
        command = [str(self.cluster.assets / "kubectl"), f"--kubeconfig={self.cluster.kubeconfig}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def apply(self, *documents: dict[str, Any]) -> None:
        """Apply manifests."""
        named = ", ".join(f"{document['kind']} {document['metadata']['name']}" for document in documents[-1:])
        self.say(f"$ kubectl apply -f -      # {named}{' and its Service' if len(documents) == 2 else ''}")
        self.kubectl("apply", "-f", "-", stdin=documents)

    def plugin(self, *arguments: str) -> str:
        """Run ``kubectl perseus``, print its output and return it."""
        command = [str(Path(sys.executable).parent / "kubectl-perseus"), *arguments, "--namespace", TRAINING]
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "COLUMNS": "110"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return self.show(f"kubectl perseus {' '.join(arguments)}", ran.stdout)

    def install(self, *flags: str) -> None:
        """Make the namespaces of release, agents and training, and install the release with simulated GPUs."""
        for name in (SYSTEM, AGENTS, TRAINING):
            self.kubectl("create", "namespace", name)
        self.helm("install", "perseus", str(CHART), "--namespace", SYSTEM, *flags)
        named = self.kubectl("-n", SYSTEM, "get", "deployments", "--output=name").split()
        deployments = [name.replace("deployment.apps/", "deployment/") for name in named]
        self.rolled_out(*deployments, "daemonset/perseus-gpu-sim", "daemonset/perseus-agent")

    def rolled_out(self, *workloads: str) -> None:
        for workload in workloads:
            namespace = AGENTS if workload.startswith("daemonset/") else SYSTEM
            output = self.kubectl("-n", namespace, "rollout", "status", workload, f"--timeout={PATIENCE_S:.0f}s")
            self.say(output.strip().splitlines()[-1])

    # What the product reports

    def every_node_offers_the_socket(self) -> None:
        """Wait until pods may request the agents' socket on every node, and the webhook therefore adds the request."""

        self.eventually("every node offers the socket", lambda: all(self.offers_of_socket()), PATIENCE_S)

    def offers_of_socket(self) -> list[bool]:
        """Return for each node whether pods may request the socket there."""
        return [node.status.allocatable.get(keys.RESOURCE_AGENT, "0") != "0" for node in self.core.list_node().items]

    def pods(self, component: str) -> list[Any]:
        """Return the pods of a component that are not being deleted."""
        selector = f"app.kubernetes.io/component=perseus-{component}"
        found = self.core.list_pod_for_all_namespaces(label_selector=selector).items
        return [pod for pod in found if pod.metadata.deletion_timestamp is None]

    def status(self, job: Training) -> dict[str, Any]:
        name = (keys.API_GROUP, keys.API_VERSION, TRAINING, keys.PLURAL, job.name)
        return dict(self.custom.get_namespaced_custom_object(*name).get("status") or {})

    def condition(self, job: Training, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        for found in self.status(job).get("conditions", ()):
            if found["type"] == kind:
                return found["status"], found["reason"], found["message"]
        return "Unknown", "", ""

    def in_force(self, job: Training) -> bool:
        return self.condition(job, "PlanApplied")[0] == "True" and "plan" in self.status(job)

    def slowdown(self, job: Training) -> float:
        """Return the planned slowdown as a share: 0.1 is 10 % slower than the fastest plan."""
        return float(self.status(job)["plan"]["plannedSlowdown"].rstrip("%")) / 100

    def plan_mhz(self, job: Training) -> list[list[set[int]]]:
        """Return the clocks of the plan in force, by pipeline and stage, from the frontier in the cluster."""
        status = self.status(job)
        assert "plan" in status, "no plan is in force"  # as for a while after its processes began again
        stored = self.frontier(job)
        frontier = Frontier.from_bytes(b64decode(stored["spec"]["data"]))
        own = {each["dataParallelRank"]: each["point"] for each in status.get("stragglers", ())}
        schedule = build_schedule("1f1b", stages=job.stages, microbatches=job.microbatches)
        first = [int(offset) for offset in schedule.stage_offset]
        plans = [frontier.frequencies_mhz[int(own.get(p, status["plan"]["point"]))] for p in range(job.pipelines)]
        return [[set(map(int, plan[first[s] : first[s + 1]])) for s in range(job.stages)] for plan in plans]

    def frontier(self, job: Training) -> Any:
        """Return the PerseusFrontier of a job."""
        return self.read("-n", TRAINING, "get", keys.FRONTIER_PLURAL, job.name)

    def restarts(self) -> dict[str, str]:
        """Return the containers of operator and agents that were restarted, and how the latest of each had ended."""
        return {
            f"{pod.metadata.name}/{status.name}": f"{status.restart_count}: {_end(status.last_state.terminated)}"
            for pod in (*self.pods("agent"), *self.pods("operator"), *self.pods("solver"))
            for status in (*pod.status.container_statuses, *(pod.status.init_container_statuses or ()))
            if status.restart_count
        }

    def rights(self, account: str) -> set[rbac.Permission]:
        """Return what the cluster allows a service account of the release, by all its roles."""
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
        """Return pipeline and stage of the rank on each GPU, as the agents identified it."""
        found = {}
        for pod in self.pods("agent"):
            name = f"{pod.metadata.name}:{keys.DEFAULT_AGENT_METRICS_PORT}"
            page = self.kubectl("get", "--raw", f"/api/v1/namespaces/{AGENTS}/pods/{name}/proxy/metrics")
            for line in page.splitlines():
                if line.startswith("perseus_gpu_rank_info{"):
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                    found[labels["gpu"]] = int(labels["dp"]), int(labels["stage"])
        return found

    # What the GPUs and the trainers show

    def gpus(self) -> dict[str, dict[str, int]]:
        """Return the state of every simulated GPU's driver, by UUID."""
        found: dict[str, dict[str, int]] = {}
        for node in self.cluster.nodes:
            found |= describe(node.root / GPUS)
        return found

    def locked(self) -> list[str]:
        """Return the GPUs that are not at default clocks."""
        return sorted(uuid for uuid, gpu in self.gpus().items() if gpu["locked_mhz"])

    def agent_exits(self) -> list[AgentExit]:
        """Start to watch the GPUs of each node for the moment when its agent ends."""
        folders = {node.name: node.root / GPUS for node in self.cluster.nodes}
        found = [AgentExit(pod, folders[pod.spec.node_name]) for pod in self.pods("agent")]
        for each in found:
            each.start()
        return found

    def training_pods(self, job: Training) -> list[Any]:
        return list(self.core.list_namespaced_pod(TRAINING, label_selector=f"{keys.LABEL_JOB}={job.name}").items)

    def log(self, job: Training) -> str:
        """Return the log of the first rank's pod, which reports iterations and their times."""
        name = re.compile(rf"{job.name}(-w-0)?-0(-|$)")  # a Job, or the first one of a JobSet
        first = next((pod.metadata.name for pod in self.training_pods(job) if name.match(pod.metadata.name)), None)
        return str(self.core.read_namespaced_pod_log(first, TRAINING)) if first else ""

    def iteration(self, job: Training) -> int:
        """Return the last iteration that the trainers report; -1 before the first."""
        found = re.findall(r"iteration (\d+): ", self.log(job))
        return int(found[-1]) if found else -1

    def iteration_times(self, job: Training) -> list[float]:
        """Return how long the reported iterations took, in seconds."""
        return [float(text) for text in re.findall(r"iteration \d+: (\S+) s", self.log(job))]

    def trains(self, job: Training, count: int) -> None:
        """Wait for a number of further iterations."""
        last = self.iteration(job)
        self.eventually(f"{count} more iterations", lambda: self.iteration(job) >= last + count, PATIENCE_S)

    def train_on(self, job: Training, before: list[Any]) -> None:
        """Check that the same pods train on, and that every clock is the plan's again."""
        self.trains(job, 5)
        self.eventually("the plan is in force", lambda: self.in_force(job), PATIENCE_S)
        self.clocks_are_the_plans(job)
        assert {pod.metadata.uid for pod in self.training_pods(job)} == {pod.metadata.uid for pod in before}

    def joules(self, job: Training, iterations: int = 8) -> float:
        """Return the energy of an iteration on all GPUs in joules, by their own counters.

        It is the slope of the line through all samples. The difference of the last and the first sample would be
        inexact, because the end of an iteration is not observed exactly.
        """
        numbers: list[float] = []
        energies: list[float] = []

        def sampled() -> bool:
            numbers.append(self.iteration(job))
            energies.append(sum(gpu["energy_mj"] for gpu in self.gpus().values()) / 1000)
            return numbers[-1] >= numbers[0] + iterations

        self.eventually(f"{iterations} more iterations", sampled, PATIENCE_S)
        return linear_regression(numbers, energies).slope

    # Checks of several of these

    def follow(self, job: Training, condition: str) -> None:
        """Wait until a plan is in force, and print what the job's conditions report meanwhile."""
        printed: list[str] = []

        def in_force() -> bool:
            for kind in ("ProfileReady", "FrontierReady", condition):
                status, reason, message = self.condition(job, kind)
                change = message.partition(":")[0]
                if message and change not in printed:
                    printed.append(change)
                    self.say(f"{kind} {status}, {reason}: {message}")
            return self.in_force(job)

        self.eventually(f"{condition} of {job.name}", in_force, PATIENCE_S)

    def slowed_for(self, job: Training, straggler: str) -> str:
        """Wait until the job reports a straggler and runs a slower plan; return the condition's message."""

        def slowed() -> str:
            status, _, message = self.condition(job, "StragglerDetected")
            assert status == "True", message
            assert message.startswith(straggler), message
            assert self.in_force(job), self.condition(job, "PlanApplied")
            assert self.slowdown(job) > 0.1, self.status(job)["plan"]
            return message

        message = str(self.eventually(f"the straggler: {straggler} …", slowed, PATIENCE_S))
        self.say(message)
        self.clocks_are_the_plans(job)
        return message

    def fast_again(self, job: Training) -> None:
        """Wait until the job reports no straggler and runs a fast plan."""

        def fast() -> bool:
            status, _, message = self.condition(job, "StragglerDetected")
            assert status == "False", message
            assert self.in_force(job), self.condition(job, "PlanApplied")
            assert self.slowdown(job) < 0.05, self.status(job)["plan"]
            return True

        self.eventually("the plan is the fast one again", fast, PATIENCE_S)
        self.say("the plan is the fast one again")
        self.clocks_are_the_plans(job)

    def clocks_are_the_plans(self, job: Training) -> None:
        """Wait until every GPU's clock is, several times in a row, a clock that the plan has for its stage."""

        def correct() -> set[int]:
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
            # Before the plan's first iteration all GPUs are at the highest clock, which every stage's plan may contain.
            assert len(seen) > 1, f"all GPUs have one clock, so no plan is in force: {seen}"
            return seen

        seen = self.eventually("every clock is the plan's", correct, PATIENCE_S)
        self.say(f"read back from the {job.ranks} GPUs: each is at a clock of its plan, {min(seen)} to {max(seen)} MHz")

    def poke(self, uuid: str, *values: str) -> None:
        """Change values of a simulated GPU, from the pod that simulates it."""
        node = next(node.name for node in self.cluster.nodes if uuid in describe(node.root / GPUS))
        pod = next(pod.metadata.name for pod in self.pods("gpu-sim") if pod.spec.node_name == node)
        command = ("python", "-m", "perseus_sim.gpus.shim_gpu", uuid, *values)
        self.say(f"$ kubectl -n {AGENTS} exec {pod} -- {' '.join(command)}")
        self.kubectl("-n", AGENTS, "exec", pod, "--", *command)

    def all_are_scraped(self, prometheus: Prometheus) -> None:
        """Wait until Prometheus scrapes the current operator, worker and agents, and nothing else."""

        def scraped() -> bool:
            pods = [pod.metadata.name for component in ("operator", "solver", "agent") for pod in self.pods(component)]
            found = prometheus.scraped()
            jobs = {job for job, _ in found}
            assert len(jobs) == 2, "the PodMonitor's, and the one of the install page"
            assert found == {(job, pod): "up" for job in jobs for pod in pods}
            return True

        self.eventually("operator and agents are found and scraped", scraped, PATIENCE_S)

    # Before and after

    def left(self) -> set[str]:
        """Return the objects of a release: those of its namespaces, and cluster-wide ones with its name."""
        found: set[str] = set()
        for kind in _CLUSTER_WIDE:
            found |= {name for name in self.kubectl("get", kind, "-o", "name").split() if "perseus" in name}
        for kind in _NAMESPACED:
            for namespace in (SYSTEM, AGENTS):
                found |= set(self.kubectl("-n", namespace, "get", kind, "-o", "name", "--ignore-not-found").split())
        return {_short(name) for name in found} - {"configmap/kube-root-ca.crt", "serviceaccount/default"}

    def clear(self) -> None:
        """Remove everything, whatever its state is."""
        crds = [name for name in self.left() if name.startswith("customresourcedefinition/")]
        if f"customresourcedefinition/{keys.PLURAL}.{keys.API_GROUP}" in crds:
            self.kubectl("delete", keys.PLURAL, "--all", "--all-namespaces", "--timeout=30s")

        def uninstalled() -> bool:
            """Helm may give up waiting for what is still being deleted."""
            self._helm("uninstall", "perseus", "--namespace", SYSTEM, "--ignore-not-found", *UNTIL_GONE)
            return True

        self.eventually("the release is uninstalled", uninstalled, PATIENCE_S)
        self.kubectl("delete", "namespace", TRAINING, SYSTEM, AGENTS, "--ignore-not-found", "--timeout=180s")
        if crds:
            self.kubectl("delete", *crds, "--ignore-not-found", "--timeout=60s")
        for node in self.cluster.nodes:  # simulated GPUs keep their state without the release
            node.run("rm", "-rf", f"/{GPUS}")


_CLUSTER_WIDE = ("crd", "clusterrole", "clusterrolebinding", "mutatingwebhookconfiguration", "priorityclass")
_NAMESPACED = (
    "pod", "secret", "service", "configmap", "role", "rolebinding", "serviceaccount", "daemonset", "deployment",
    "networkpolicy", "lease",
)  # fmt: skip


def _end(terminated: Any) -> str:
    return f"{terminated.reason}, exit code {terminated.exit_code}" if terminated else "unknown"


def _short(name: str) -> str:
    """Return a name without the kind's group, in the form that ``kubectl get`` accepts."""
    kind, _, rest = name.partition("/")
    return f"{kind.partition('.')[0]}/{rest}"

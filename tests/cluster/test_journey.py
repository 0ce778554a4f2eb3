"""A user's way with the product on a real cluster: install, train, plan, stragglers, upgrade, delete, uninstall.

Everything is done by helm and kubectl, as the documentation says; what is true is read from the simulated GPUs
themselves, by ``kubectl exec`` into the pod that makes them. Run with ``-s``, it can be read as a story.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from stage import CHART, PATIENCE_S

from perseus_proto import keys
from perseus_sim.model import MODELS, profile_csv
from perseus_solver.result import Frontier
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.timeout(1200)

SYSTEM, TRAINING, JOB = "perseus-system", "research", "gpt3"
STAGES, PIPELINES, MICROBATCHES, NODES = 8, 2, 8, 2
A100 = MODELS["a100"]
VALUES = {
    "simulatedGpus": {"enabled": True},
    "webhook": {"enabled": True},
    "operator": {"settings": {"agentPollS": 1.0, "statusIntervalS": 1.0, "calibrateAfter": 1_000_000}},
    "agent": {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}},
}
TRAINER = {
    "name": "trainer",
    "image": "perseus-trainer:0.1.0",
    "args": [
        f"--stages={STAGES}", f"--pipelines={PIPELINES}", f"--microbatches={MICROBATCHES}",
        f"--blocking-power={A100.blocking_power_w}", "--profile=/profile/profile.csv",
    ],
    "volumeMounts": [{"name": "profile", "mountPath": "/profile"}],
}  # fmt: skip
PERSEUS_JOB = {
    "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
    "kind": keys.KIND,
    "metadata": {"name": JOB, "namespace": TRAINING},
    "spec": {
        "pipeline": {
            "schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": PIPELINES,
        },
        "profile": {
            "configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": round(1000 * A100.blocking_power_w),
        },
        "straggler": {"mode": "Automatic", "slowdownThreshold": "5%", "recoveryThreshold": "2%"},
        "baselineIterations": 3,
        "points": 40,
    },
}  # fmt: skip


class Journey:
    """What a user does and sees."""

    def __init__(self, cluster: Any, api: Any, helm: Callable[..., str], eventually: Callable[..., Any]) -> None:
        self.cluster, self.helm, self.eventually = cluster, helm, eventually
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._begun = time.monotonic()

    def say(self, words: str) -> None:
        print(f"{time.monotonic() - self._begun:5.0f} s  {words}", flush=True)

    def kubectl(self, *arguments: str, stdin: Any = None) -> str:
        said: str = self.cluster.kubectl(*arguments, stdin="" if stdin is None else yaml.safe_dump_all(stdin))
        return said

    def plugin(self, *arguments: str) -> str:
        """kubectl perseus."""
        command = [str(Path(sys.executable).parent / "kubectl-perseus"), *arguments, "--namespace", TRAINING]
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "COLUMNS": "110"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def pods(self, component: str) -> list[Any]:
        selector = f"app.kubernetes.io/component=perseus-{component}"
        return list(self.core.list_namespaced_pod(SYSTEM, label_selector=selector).items)

    def gpus(self, *poke: str) -> dict[str, dict[str, int]]:
        """Every simulated GPU of the cluster by UUID, as the pods see them that make them."""
        found: dict[str, dict[str, int]] = {}
        for pod in self.pods("gpu-sim"):
            said = self.kubectl(
                "-n", SYSTEM, "exec", pod.metadata.name, "--", "python", "-m", "perseus_sim.shim_gpu", *poke
            )
            found |= json.loads(said)
        return found

    def status(self) -> dict[str, Any]:
        place = (keys.API_GROUP, keys.API_VERSION, TRAINING, keys.PLURAL, JOB)
        return dict(self.custom.get_namespaced_custom_object(*place).get("status") or {})

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Status, reason and message."""
        for said in self.status().get("conditions", ()):
            if said["type"] == kind:
                return said["status"], said["reason"], said["message"]
        return "Unknown", "", ""

    def in_force(self) -> bool:
        return self.condition("PlanApplied")[:2] == ("True", "PlanInForce")

    def iteration(self) -> int:
        """The last that the trainers tell of."""
        [pod] = [
            pod.metadata.name
            for pod in self.core.list_namespaced_pod(TRAINING, label_selector=f"{keys.LABEL_JOB}={JOB}").items
            if pod.metadata.name.startswith(f"{JOB}-0")
        ]
        said = re.findall(r"iteration (\d+): ", self.core.read_namespaced_pod_log(pod, TRAINING))
        return int(said[-1]) if said else -1

    def trains(self, count: int) -> None:
        """Wait for so many more iterations."""
        last = self.iteration()
        self.eventually(f"{count} more iterations", lambda: self.iteration() >= last + count, PATIENCE_S)

    def watts(self, iterations: int = 8) -> float:
        """Mean power of all GPUs by their own energy counters, while some iterations pass."""
        first, begun = self.gpus(), time.monotonic()
        self.trains(iterations)
        last, taken_s = self.gpus(), time.monotonic() - begun
        return sum(last[uuid]["energy_mj"] - first[uuid]["energy_mj"] for uuid in first) / 1000 / taken_s

    def plan_mhz(self, pipeline: int) -> list[set[int]]:
        """For every stage, the clocks of the plan that is in force for a pipeline, from the frontier in the cluster."""
        status = self.status()
        kept = self.core.read_namespaced_config_map(status["frontier"]["configMapName"], TRAINING)
        frontier = Frontier.from_bytes(b64decode(kept.binary_data["frontier"]))
        points = {own["dataParallelRank"]: own["point"] for own in status.get("stragglers", ())}
        plan = frontier.frequencies_mhz[int(points.get(pipeline, status["plan"]["point"]))]
        offsets = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES).stage_offset
        return [set(map(int, plan[offsets[s] : offsets[s + 1]])) for s in range(STAGES)]


@pytest.fixture(scope="module")
def journey(cluster: Any, api: Any, helm: Any, images: set[str], eventually: Any) -> Iterator[Journey]:
    """From helm install to helm uninstall, and that nothing is left."""
    if len(cluster.nodes) < NODES:
        pytest.skip(f"the journey goes over {NODES} nodes, the cluster has {len(cluster.nodes)}")
    journey = Journey(cluster, api, helm, eventually)
    before = left(journey)
    journey.kubectl("create", "namespace", SYSTEM)
    journey.kubectl("create", "namespace", TRAINING)
    journey.say("helm install perseus charts/perseus")
    flags = [word for key, value in VALUES.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
    helm("install", "perseus", str(CHART), "--namespace", SYSTEM, *flags)
    for workload in ("daemonset/perseus-gpu-sim", "daemonset/perseus-agent", "deployment/perseus-operator"):
        rolled = journey.kubectl("-n", SYSTEM, "rollout", "status", workload, f"--timeout={PATIENCE_S:.0f}s")
        journey.say(rolled.strip().splitlines()[-1])
    offered = [node.status.allocatable.get("nvidia.com/gpu") for node in journey.core.list_node().items]
    journey.say(f"the kubelets offer {' and '.join(map(str, offered))} GPUs")
    profile = {"metadata": {"name": "profile"}, "data": {"profile.csv": profile_csv(STAGES, imbalance=1.25)}}
    journey.core.create_namespaced_config_map(TRAINING, profile)

    yield journey

    journey.say("helm uninstall perseus")
    helm("uninstall", "perseus", "--namespace", SYSTEM, "--wait")
    journey.kubectl("delete", "namespace", TRAINING, "--timeout=120s")
    remaining = left(journey) - before
    assert remaining == {
        f"crd/{keys.PLURAL}.{keys.API_GROUP}",
        *(name for name in remaining if name.startswith("crd/") and name.endswith(keys.API_GROUP)),
        "configmap/perseus-epoch",
    }, remaining
    for node in cluster.nodes:
        assert "perseus" not in node.run("ls", "/var/lib/kubelet/device-plugins").stdout
    journey.say("nothing is left but the definitions, and the number from which the next operator counts on")
    journey.kubectl("delete", "namespace", SYSTEM, "--timeout=120s")
    journey.kubectl("delete", "crd", *(name.removeprefix("crd/") for name in remaining if name.startswith("crd/")))


def left(journey: Journey) -> set[str]:
    """What a release could leave: objects of its namespace, and those of no namespace."""
    kinds = "crd,clusterrole,clusterrolebinding,mutatingwebhookconfiguration,priorityclass"
    found = {
        f"{kind}/{name}"
        for kind in kinds.split(",")
        for name in re.findall(r"/(\S+)", journey.kubectl("get", kind, "-o", "name"))
        if "perseus" in name
    }
    for kind in ("pod", "secret", "service", "configmap", "role", "rolebinding", "serviceaccount", "daemonset"):
        said = journey.kubectl("-n", SYSTEM, "get", kind, "-o", "name", "--ignore-not-found")
        found |= {
            f"{kind}/{name}" for name in re.findall(r"/(\S+)", said) if name not in ("kube-root-ca.crt", "default")
        }
    return found


def headless() -> dict[str, Any]:
    """By which ranks find the first of them, as with every launcher."""
    spec = {"clusterIP": "None", "selector": {keys.LABEL_JOB: JOB}, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": JOB, "namespace": TRAINING}, "spec": spec}


def pod_spec(gpus: int, **more: Any) -> dict[str, Any]:
    """A training pod as its owner would write it: nothing of Perseus in it but the label."""
    environment = [{"name": "MASTER_ADDR", "value": f"{JOB}-0.{JOB}.{TRAINING}.svc.cluster.local"}]
    container = {
        **TRAINER, "env": [*environment, *more.pop("env", ())], "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
        "securityContext": {
            "runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }  # fmt: skip
    return {
        "subdomain": JOB,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 8,
        "containers": [container],
        "volumes": [{"name": "profile", "configMap": {"name": "profile"}}],
        **more,
    }


def indexed_job() -> list[dict[str, Any]]:
    """One pod for each rank."""
    ranks = STAGES * PIPELINES
    template = {"metadata": {"labels": {keys.LABEL_JOB: JOB}}, "spec": pod_spec(1)}
    spec = {"completions": ranks, "parallelism": ranks, "completionMode": "Indexed", "template": template}
    metadata = {"name": JOB, "namespace": TRAINING}
    return [headless(), {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def plain_pods() -> list[dict[str, Any]]:
    """One pod for each node, as torchrun is often started."""
    pods = []
    for number in range(NODES):
        rank = {"name": "NODE_RANK", "value": str(number)}
        spec = pod_spec(STAGES * PIPELINES // NODES, env=[rank], hostname=f"{JOB}-{number}")
        metadata = {"name": f"{JOB}-{number}", "namespace": TRAINING, "labels": {keys.LABEL_JOB: JOB}}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return [headless(), *pods]


def begin(journey: Journey, workload: list[dict[str, Any]]) -> None:
    """Train, ask for a plan, and see it in force on every GPU."""
    journey.say(f"kubectl apply: training on {STAGES * PIPELINES} GPUs, {PIPELINES} pipelines of {STAGES} stages")
    journey.kubectl("apply", "-f", "-", stdin=workload)
    journey.eventually("the ranks train", lambda: journey.iteration() >= 0, PATIENCE_S)
    pods = journey.core.list_namespaced_pod(TRAINING, label_selector=f"{keys.LABEL_JOB}={JOB}").items
    for pod in pods:
        [container] = pod.spec.containers
        assert {v.name for v in container.env} >= {keys.ENV_SOCKET}, "the webhook has given it the socket"
    nodes = sorted(pod.spec.node_name for pod in pods)
    journey.say(f"{len(pods)} pods train, {', '.join(f'{nodes.count(n)} on {n}' for n in sorted(set(nodes)))}")
    assert not any(gpu["locked_mhz"] for gpu in journey.gpus().values()), "nobody has asked for anything yet"


def planned(journey: Journey) -> None:
    journey.say("kubectl apply: the PerseusJob")
    journey.kubectl("apply", "-f", "-", stdin=[PERSEUS_JOB])
    journey.eventually("the plan is in force", journey.in_force, PATIENCE_S)
    journey.say(f"in force: {journey.condition('PlanApplied')[2]}")
    clocks_are_those_of_the_plan(journey)


def clocks_are_those_of_the_plan(journey: Journey) -> None:
    """For some seconds, every GPU's clock is one that the plan has for the stage of the rank that computes on it."""
    stage_of = ranks_by_gpu(journey)
    assert sorted(stage_of.values()) == sorted((p, s) for p in range(PIPELINES) for s in range(STAGES))
    allowed = {pipeline: journey.plan_mhz(pipeline) for pipeline in range(PIPELINES)}
    seen: set[int] = set()
    for _ in range(3):
        for uuid, gpu in journey.gpus().items():
            pipeline, stage = stage_of[uuid]
            clock = gpu["locked_mhz"] or gpu["max_mhz"]
            assert clock in allowed[pipeline][stage], (uuid, gpu, allowed[pipeline][stage])
            seen.add(clock)
    assert len(seen) > 1, "no clock was set at all"
    journey.say(f"clocks read back from the GPUs are the plan's, of {STAGES * PIPELINES}: {sorted(seen)} MHz")


def ranks_by_gpu(journey: Journey) -> dict[str, tuple[int, int]]:
    """Pipeline and stage of the rank on each GPU, as the agents identified it."""
    found = {}
    for pod in journey.pods("agent"):
        metrics = journey.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod.metadata.name}:9471/proxy/metrics"
        )
        for line in metrics.splitlines():
            if line.startswith("perseus_gpu_rank_info{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                found[labels["gpu"]] = int(labels["pipeline"]), int(labels["stage"])
    return found


def end(journey: Journey, kinds: str) -> None:
    """Everything is deleted, and every GPU gets its default clocks back."""
    journey.say("kubectl delete: the PerseusJob and the training")
    journey.kubectl("-n", TRAINING, "delete", f"{keys.PLURAL}/{JOB}", f"--timeout={PATIENCE_S:.0f}s")
    journey.eventually("default clocks", lambda: not any(g["locked_mhz"] for g in journey.gpus().values()))
    journey.kubectl("-n", TRAINING, "delete", kinds, "--all", f"--timeout={PATIENCE_S:.0f}s")
    journey.say("every GPU is at its default clocks")


def test_an_indexed_job_from_plan_to_deletion(journey: Journey) -> None:
    begin(journey, indexed_job())
    at_full_clocks_w = journey.watts()
    journey.say(f"all at full clocks, the counters of all GPUs say {at_full_clocks_w:.0f} W")
    planned(journey)

    # What is saved, by the GPUs' own counters, and what the product says of it.
    planned_w = journey.watts()
    saved = 1 - planned_w / at_full_clocks_w
    journey.say(f"under the plan they say {planned_w:.0f} W: {saved:.1%} less, at the same speed")
    assert saved > 0.04
    journey.eventually("savings are measured", lambda: "energy" in journey.status().get("savings", {}), PATIENCE_S)
    said = float(journey.status()["savings"]["energy"].rstrip("%")) / 100
    assert said == pytest.approx(saved, abs=0.04), "what the status says, and what the counters say"
    what_the_user_sees(journey)
    a_straggler_told(journey)
    a_straggler_by_heat(journey)
    an_upgrade_in_mid_run(journey)
    end(journey, "job,service")


def what_the_user_sees(journey: Journey) -> None:
    for command in (("get", "pj", JOB), ("describe", "pj", JOB)):
        said = journey.kubectl("-n", TRAINING, *command)
        journey.say(f"kubectl {' '.join(command)}\n{said if command[0] == 'get' else said[-900:]}")
        assert JOB in said
    events = journey.kubectl("-n", TRAINING, "get", "events", "--field-selector", f"involvedObject.kind={keys.KIND}")
    journey.say(f"kubectl get events\n{events}")
    assert "PlanInForce" in events or "PlanChanged" in events, events
    for command in ("frontier", "explain"):
        said = journey.plugin(command, JOB)
        journey.say(f"kubectl perseus {command} {JOB}\n{said}")


def straggling(journey: Journey) -> bool:
    return journey.condition("StragglerDetected")[0] == "True"


def a_straggler_told(journey: Journey) -> None:
    """An infrastructure that knows tells it: the other pipeline then need not hurry."""
    point = journey.status()["plan"]["point"]
    journey.say("kubectl annotate: pipeline 1 will be 1.3 times slower")
    annotation = f"{keys.ANNOTATION_STRAGGLER}=1:0:1.3"
    journey.kubectl("-n", TRAINING, "annotate", f"{keys.PLURAL}/{JOB}", annotation)
    journey.eventually("the straggler is active", straggling, PATIENCE_S)
    journey.say(f"straggler: {journey.condition('StragglerDetected')[2]}")
    slower = lambda: journey.in_force() and journey.status()["plan"]["point"] > point  # noqa: E731
    journey.eventually("the other pipeline runs a slower plan", slower, PATIENCE_S)
    clocks_are_those_of_the_plan(journey)
    journey.kubectl("-n", TRAINING, "annotate", f"{keys.PLURAL}/{JOB}", f"{keys.ANNOTATION_STRAGGLER}-")
    journey.eventually("the straggler has passed", lambda: not straggling(journey), PATIENCE_S)
    back = lambda: journey.in_force() and journey.status()["plan"]["point"] == point  # noqa: E731
    journey.eventually("the plan is back", back, PATIENCE_S)
    journey.say("it has passed, and the plan is back")


def a_straggler_by_heat(journey: Journey) -> None:
    """A GPU throttles: found from timings and from the driver's reasons, without a word from anybody."""
    hot = next(uuid for uuid, (pipeline, _) in ranks_by_gpu(journey).items() if pipeline == 0)
    journey.say(f"{hot} gets too hot: 900 MHz at most")
    journey.gpus(hot, "cap_mhz=900", "reasons=64")
    journey.eventually("the straggler is found", straggling, PATIENCE_S)
    journey.say(f"straggler: {journey.condition('StragglerDetected')[2]}")
    journey.gpus(hot, "cap_mhz=0", "reasons=0")
    journey.eventually("it has passed", lambda: not straggling(journey), PATIENCE_S)
    journey.eventually("the plan is back", journey.in_force, PATIENCE_S)
    journey.say("it has cooled down, and the plan is back")


def an_upgrade_in_mid_run(journey: Journey) -> None:
    """Agents are replaced one after the other; training does not notice, and no clock stays locked for want of one."""
    before, agents = journey.iteration(), {pod.metadata.uid for pod in journey.pods("agent")}
    restarts = trainers(journey)
    journey.say("helm upgrade: another setting for the agents")
    flags = ["--reset-then-reuse-values", "--set", "agent.settings.sampleIntervalMs=60"]
    journey.helm("upgrade", "perseus", str(CHART), "--namespace", SYSTEM, *flags)
    rollout = ("rollout", "status", "daemonset/perseus-agent", f"--timeout={PATIENCE_S:.0f}s")
    journey.kubectl("-n", SYSTEM, *rollout)
    assert not agents & {pod.metadata.uid for pod in journey.pods("agent") if not pod.metadata.deletion_timestamp}
    journey.trains(3)
    everybody = lambda: len(ranks_by_gpu(journey)) == STAGES * PIPELINES  # noqa: E731
    journey.eventually("all ranks are back", everybody, PATIENCE_S)
    journey.eventually("the plan is in force again", journey.in_force, PATIENCE_S)
    clocks_are_those_of_the_plan(journey)
    assert trainers(journey) == restarts, "a training process has died"
    journey.say(f"all agents are new; training went on, from iteration {before} to {journey.iteration()}")


def trainers(journey: Journey) -> dict[str, int]:
    """Restarts by pod."""
    pods = journey.core.list_namespaced_pod(TRAINING, label_selector=f"{keys.LABEL_JOB}={JOB}").items
    return {pod.metadata.uid: pod.status.container_statuses[0].restart_count for pod in pods}


def test_plain_pods_with_several_ranks_each(journey: Journey) -> None:
    begin(journey, plain_pods())
    planned(journey)
    end(journey, "pod,service")

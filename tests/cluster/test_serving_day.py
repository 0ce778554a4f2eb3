"""A day of load on the cluster, compressed into minutes: KEDA makes as many replicas as are advised, requests keep
their limits, and joules are measured.

Nothing is a stand-in but GPUs, engines, and the router that sends them requests: it runs in the control plane's
network, from which it reaches pods. Engines say themselves what became of their requests. Takes about half an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from installation import PATIENCE_S
from journey import AGENTS, Journey
from keda import keda
from tests.doubles.serving_day import FIRST_TOKEN_S, MODEL, PER_TOKEN_S, Watched
from training import TRAINING

from perseus_core import keys

pytestmark = [pytest.mark.timeout(3_600), pytest.mark.usefixtures("one_chapter_after_the_other")]

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "deploy" / "samples"
POOL = "chat"
MOST = 4
"""Replicas: as many as there are GPUs."""
PORT = 8000
DRAINED_S = 8
"""A pod that is to end gets no more requests, and serves for so long what it has."""
FLAGS = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", f"simulatedGpus.enabled=true,simulatedGpus.model=h100,simulatedGpus.count={MOST // 2}"),
    *("--set", "scaler.enabled=true,webhook.enabled=true"),
)


@pytest.fixture(scope="module")
def journey(cleared_journey: Journey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    with keda(cleared_journey.cluster, tmp_path_factory.mktemp("keda"), patience_s=PATIENCE_S):
        cleared_journey.install(*FLAGS)
        yield cleared_journey
        cleared_journey.clear()  # while KEDA runs, which ends what its objects have


def deployment() -> dict[str, Any]:
    """The sample, with one replica whose requests are a router's."""
    body: dict[str, Any] = yaml.safe_load((SAMPLES / "unmodified-deployment.yaml").read_text())
    body["metadata"]["namespace"] = TRAINING
    body["spec"]["replicas"] = 1
    template = body["spec"]["template"]
    template["metadata"]["labels"][keys.LABEL_JOB] = POOL
    template["spec"]["terminationGracePeriodSeconds"] = DRAINED_S + 5
    [engine] = template["spec"]["containers"]
    engine["command"] = [
        *("python", "-m", "perseus_sim.serving.pod_engine", f"--model={MODEL}", f"--port={PORT}", "--per-second=0"),
        *(f"--first-token-s={FIRST_TOKEN_S}", f"--per-token-s={PER_TOKEN_S}"),
    ]
    engine["lifecycle"] = {"preStop": {"sleep": {"seconds": DRAINED_S}}}
    engine["readinessProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
    return body


def pool() -> dict[str, Any]:
    limits = {"timeToFirstToken": FIRST_TOKEN_S, "timePerOutputToken": PER_TOKEN_S}
    return {
        "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
        "kind": keys.POOL_KIND,
        "metadata": {"name": POOL, "namespace": TRAINING},
        "spec": {
            "workload": {"apiVersion": "apps/v1", "kind": "Deployment", "name": POOL},
            "objective": {time: {"limit": f"{1000 * limit_s:.0f}ms"} for time, limit_s in limits.items()},
            "mode": "Enforce",
        },
    }


def scaled_object() -> dict[str, Any]:
    """The sample, with our names."""
    body: dict[str, Any] = yaml.safe_load((SAMPLES / "scaledobject.yaml").read_text())
    body["metadata"] = {"name": POOL, "namespace": TRAINING}
    body["spec"]["scaleTargetRef"]["name"] = POOL
    body["spec"]["maxReplicaCount"] = MOST
    [trigger] = body["spec"]["triggers"]
    trigger["metadata"]["pool"] = POOL
    return body


class Day:
    """What is seen of pods while it passes."""

    def __init__(self, journey: Journey, folder: Path) -> None:
        self.journey, self.addresses = journey, folder / "addresses"
        self.totals: dict[str, dict[str, Any]] = {}
        """What each engine has said last, those that have ended too."""
        self.addresses.write_text("")

    def look(self) -> str:
        """Take in what there is now; addresses of the replicas that take requests, one a line."""
        core = self.journey.core
        pods = core.list_namespaced_pod(TRAINING, label_selector=f"app={POOL}").items
        ready = [pod for pod in pods if pod.metadata.deletion_timestamp is None and is_ready(pod)]
        addresses = "\n".join(f"{pod.status.pod_ip}:{PORT}" for pod in ready)
        partial = self.addresses.with_suffix(".partial")
        partial.write_text(addresses)
        partial.replace(self.addresses)
        for pod in pods:
            if pod.status.phase == "Running":
                log = core.read_namespaced_pod_log(pod.metadata.name, TRAINING, tail_lines=1).strip()
                if log.startswith("{"):
                    self.totals[pod.metadata.name] = json.loads(log)
        return addresses

    def sum(self, key: str) -> float:
        return float(sum(one[key] for one in self.totals.values()))

    def pool(self) -> Any:
        return self.journey.read("-n", TRAINING, "get", keys.POOL_PLURAL, POOL).get("status") or {}


def is_ready(pod: Any) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


@pytest.fixture(scope="module")
def day(journey: Journey, tmp_path_factory: pytest.TempPathFactory) -> Day:
    return Day(journey, tmp_path_factory.mktemp("day"))


def test_a_pool_of_one_replica_is_advised(day: Day) -> None:
    day.journey.apply(deployment())
    day.journey.apply(pool())
    day.journey.eventually("an engine speaks", lambda: (day.pool().get("engine") or {}).get("model"), PATIENCE_S)


def test_replicas_follow_the_day_and_requests_keep_their_limits(day: Day) -> None:
    journey, report = day.journey, day.addresses.with_name("report")
    watched, now_s, printed = Watched([]), 0.0, 0.0
    journey.apply(scaled_object())
    journey.eventually("the replica takes requests", day.look, PATIENCE_S)
    command = [sys.executable, "-m", "tests.doubles.serving_day", str(day.addresses), str(report)]
    router = subprocess.Popen([*journey.cluster.control_plane.enter(network_only=True), *command], cwd=ROOT)
    try:
        while not watched.replicas or not watched.over(now_s):
            day.look()
            now_s = json.loads(report.read_text())["now_s"] if report.exists() else 0.0
            asked = journey.read("-n", TRAINING, "get", "deployment", POOL)["spec"]["replicas"]
            lowered = any(gpu["locked_mhz"] for gpu in journey.gpus().values())
            if watched.look(asked, lowered=lowered) or now_s - printed > 60.0:
                printed = now_s
                journey.say(f"{now_s:.0f} s: {asked} replicas; {day.pool().get('advice', {}).get('why')}")
            assert router.poll() is None, "the router has ended"
            time.sleep(1.0)
    finally:
        router.terminate()
        router.wait(60)
    sent = json.loads(report.read_text())
    assert sent["refused"] == 0

    def all_ended() -> bool:
        """What a replica served after it spoke last is not known: two seconds' at most."""
        day.look()
        assert day.sum("ended") >= 0.995 * sent["sent"], f"{day.sum('ended')} of {sent['sent']} requests have ended"
        return True

    journey.eventually("the last requests end", all_ended, PATIENCE_S)
    journey.say(watched.check(day.sum("joules"), int(day.sum("kept")), int(day.sum("ended")), now_s))
    journey.plugin("serving", POOL)

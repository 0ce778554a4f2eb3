"""A Deployment of simulated vLLM under load, from one label on its namespace to a measured saving: no object of ours is
written by a user. Then it is rolled over and scaled, and a node is lost.

The chapters depend on one another; with ``-s`` they print the journey. Engines say themselves how many requests kept
their limits; clocks are read from the simulated GPUs, outside of every pod.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults import kill_part, start_all
from installation import PATIENCE_S
from journey import AGENTS, Journey
from metrics_adapter import adapter
from outside_gpu import GPUS
from training import TRAINING

from perseus_core import keys
from perseus_sim.gpus.shim_gpu import describe

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "unmodified-deployment.yaml"
POOL, BY_PAGE = "chat", "unplugged"
REPLICAS = 2
MOST = 3
"""Replicas: of four GPUs one is left for a rollout."""
SLOWEST_S = 2 * PATIENCE_S
"""A thousand requests are counted for the baseline, and the canary tries as many clocks as a fifth more time allows."""
SPAN_S = 60.0
"""In which a thousand requests end: joules of a token move with the load, by some percent in so long."""
LEAST_SAVED = 0.05
"""Of the joules of a token, by the engines' own account."""
FIRST_TOKEN_S, PER_TOKEN_S = 0.25, 0.025
FLAGS = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true,simulatedGpus.model=h100,simulatedGpus.count=2"),
    *("--set", "webhook.enabled=true,agent.reader.enabled=true"),
)


def sample() -> dict[str, Any]:
    """The Deployment that the page about classes has readers try."""
    body: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    body["metadata"]["namespace"] = TRAINING
    return body


def without_plugin() -> dict[str, Any]:
    """The same engine, one replica, that says nothing by itself, opted in by our label."""
    body = sample()
    body["metadata"]["name"] = BY_PAGE
    spec = body["spec"]
    spec["replicas"], spec["selector"]["matchLabels"]["app"] = 1, BY_PAGE
    spec["template"]["metadata"]["labels"] = {"app": BY_PAGE, keys.LABEL_JOB: BY_PAGE}
    spec["template"]["spec"]["containers"][0]["command"].append("--no-plugin")
    return body


def pool(name: str, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
        "kind": keys.POOL_KIND,
        "metadata": {"name": name, "namespace": TRAINING},
        "spec": {
            "workload": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "objective": {
                "timeToFirstToken": {"limit": f"{1000 * FIRST_TOKEN_S:.0f}ms"},
                "timePerOutputToken": {"limit": f"{1000 * PER_TOKEN_S:.0f}ms"},
            },
            "mode": mode,
        },
    }


def autoscaler(name: str) -> dict[str, Any]:
    """As the page about replicas says."""
    metric = {"name": "perseus_pool_advised_replicas", "selector": {"matchLabels": {"job_name": name}}}
    at_once = {"stabilizationWindowSeconds": 0, "tolerance": "0"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "namespace": TRAINING},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": 1,
            "maxReplicas": MOST,
            "metrics": [
                {
                    "type": "External",
                    "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
                }
            ],
            "behavior": {"scaleUp": at_once, "scaleDown": at_once},
        },
    }


class Serving:
    """What a user sees of pools and engines."""

    def __init__(self, journey: Journey) -> None:
        self.journey = journey
        self.default = 0.0, 0.0
        """Joules and tokens before any clock was set."""
        self.said: dict[str, str] = {}
        """What each condition has said last."""

    def pool(self, name: str) -> Any:
        return self.journey.read("-n", TRAINING, "get", keys.POOL_PLURAL, name)

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        for each in (self.pool(name).get("status") or {}).get("conditions", ()):
            if each["type"] == kind:
                return each["status"], each["reason"], each["message"]
        return "Unknown", "", ""

    def true(self, name: str, kind: str) -> bool:
        status, reason, message = self.condition(name, kind)
        assert status == "True", f"{kind} is {status}, {reason}: {message}"
        return True

    def pods(self, name: str) -> list[Any]:
        listed = self.journey.core.list_namespaced_pod(TRAINING, label_selector=f"app={name}").items
        return [pod for pod in listed if pod.metadata.deletion_timestamp is None and pod.status.phase == "Running"]

    def told(self, name: str) -> list[dict[str, Any]]:
        """What each engine has said last about its requests."""
        logs = [self.journey.core.read_namespaced_pod_log(pod.metadata.name, TRAINING) for pod in self.pods(name)]
        return [json.loads(log.strip().splitlines()[-1]) for log in logs if log.strip()]

    def totals(self, name: str) -> tuple[float, float]:
        """Joules and tokens by the engines' own account, since they began."""
        told = self.told(name)
        return sum(one["joules"] for one in told), sum(one["tokens"] for one in told)

    def joules_per_token(self, name: str, span_s: float) -> float:
        """Over a span of time from now on."""
        before = self.totals(name)
        time.sleep(span_s)
        joules, tokens = (after - one for after, one in zip(self.totals(name), before, strict=True))
        return joules / tokens

    def says(self, name: str, kind: str) -> bool:
        """Print a condition's message if it is another, and tell whether the condition is true."""
        status, reason, message = self.condition(name, kind)
        if message != self.said.get(kind):
            self.said[kind] = message
            self.journey.say(f"{kind} {status}, {reason}: {message}")
        return status == "True"

    def follow(self, name: str, replicas: int) -> bool:
        """Whether so many replicas run, are seen, and have a clock."""
        assert len(self.pods(name)) == replicas
        assert len(self.locked_mhz()) == replicas
        return self.true(name, "Ready")

    def keep_their_limits(self, name: str) -> None:
        found = self.told(name)
        self.journey.say(f"engines: {found}")
        assert sum(one["kept"] for one in found) >= 0.98 * sum(one["ended"] for one in found)

    def locked_mhz(self) -> list[int]:
        return sorted(gpu["locked_mhz"] for gpu in self.journey.gpus().values() if gpu["locked_mhz"])


@pytest.fixture(scope="module")
def journey(cleared_journey: Journey) -> Journey:
    cleared_journey.install(*FLAGS)
    return cleared_journey


@pytest.fixture(scope="module")
def serving(journey: Journey) -> Serving:
    return Serving(journey)


def test_an_engine_with_the_plugin_is_seen_by_its_pool(serving: Serving) -> None:
    journey = serving.journey
    journey.say(f"$ kubectl label namespace {TRAINING} {keys.LABEL_CLASS}=default")
    journey.kubectl("label", "namespace", TRAINING, f"{keys.LABEL_CLASS}=default")
    journey.apply(sample())
    journey.eventually("its ServingPool is made", lambda: serving.condition(POOL, "Accepted")[0] == "True", PATIENCE_S)
    journey.eventually("engines say what they do", lambda: serving.true(POOL, "SignalsReady"), PATIENCE_S)
    journey.say(serving.condition(POOL, "SignalsReady")[2])
    assert serving.condition(POOL, "ClocksApplied")[1] == "MeasuringBaseline"
    journey.show(f"kubectl -n {TRAINING} get sp", journey.kubectl("-n", TRAINING, "get", keys.POOL_PLURAL))


def test_the_baseline_is_of_default_clocks(serving: Serving) -> None:
    def measured() -> bool:
        totals = serving.totals(POOL)
        waits = serving.condition(POOL, "ClocksApplied")[1] == "MeasuringBaseline"
        if waits:
            assert serving.locked_mhz() == []
            serving.default = totals
        return not waits

    serving.journey.eventually("a thousand requests are counted", measured, SLOWEST_S)


def test_one_replica_is_measured_then_all_follow_their_load(serving: Serving) -> None:
    journey = serving.journey
    journey.eventually("one replica is tried at a lower clock", lambda: len(serving.locked_mhz()) == 1, SLOWEST_S)
    journey.eventually("the engine is explained", lambda: serving.says(POOL, "ProfileReady"), SLOWEST_S)
    journey.eventually("agents hold the table", lambda: serving.says(POOL, "ClocksApplied"), PATIENCE_S)
    journey.eventually("every replica has its clock", lambda: len(serving.locked_mhz()) == REPLICAS, PATIENCE_S)
    joules, tokens = serving.default
    default, law = joules / tokens, serving.joules_per_token(POOL, SPAN_S)
    journey.say(f"{law:.3f} J a token, after {default:.3f} J at default clocks: {1.0 - law / default:.1%} saved")
    journey.plugin("serving", POOL)
    assert law < (1 - LEAST_SAVED) * default
    journey.eventually("requests keep their limits", lambda: serving.says(POOL, "ObjectiveKept"), PATIENCE_S)
    serving.keep_their_limits(POOL)


def test_a_replica_that_is_replaced_follows_as_well(serving: Serving) -> None:
    journey = serving.journey
    gone = serving.pods(POOL)[0].metadata.name
    journey.kubectl("-n", TRAINING, "delete", "pod", gone, "--wait")

    def follows() -> bool:
        names = {pod.metadata.name for pod in serving.pods(POOL)}
        assert len(names) == REPLICAS
        assert gone not in names
        return serving.true(POOL, "SignalsReady") and len(serving.locked_mhz()) == REPLICAS

    journey.eventually("its successor follows its load", follows, PATIENCE_S)


def test_replicas_come_and_go_under_load(serving: Serving) -> None:
    journey = serving.journey
    for replicas in (1, MOST, REPLICAS):
        journey.kubectl("-n", TRAINING, "scale", "deployment", POOL, f"--replicas={replicas}")
        count = f"{replicas} replicas follow their load"
        journey.eventually(count, lambda replicas=replicas: serving.follow(POOL, replicas), PATIENCE_S)
    serving.keep_their_limits(POOL)


def test_an_autoscaler_makes_as_many_replicas_as_are_advised(serving: Serving, tmp_path: Path) -> None:
    journey = serving.journey

    def as_advised() -> bool:
        advice = serving.pool(POOL)["status"]["advice"]
        assert "replicas" in advice, advice["why"]
        advised = min(MOST, advice["replicas"])
        asked = journey.read("-n", TRAINING, "get", "deployment", POOL)["spec"]["replicas"]
        assert asked == advised, f"{asked} replicas are asked for, {advised} advised"
        return serving.follow(POOL, advised)

    with adapter(journey, "serving-replicas.md", FLAGS, tmp_path):
        journey.apply(autoscaler(POOL))
        for by_hand in (1, MOST):
            journey.kubectl("-n", TRAINING, "scale", "deployment", POOL, f"--replicas={by_hand}")
            journey.eventually("the autoscaler makes the advised replicas, and all follow", as_advised, PATIENCE_S)
            journey.say(serving.pool(POOL)["status"]["advice"]["why"])
        assert "lastScaleTime" in journey.read("-n", TRAINING, "get", "hpa", POOL)["status"]
        journey.kubectl("-n", TRAINING, "delete", "hpa", POOL)
    serving.keep_their_limits(POOL)
    journey.kubectl("-n", TRAINING, "scale", "deployment", POOL, f"--replicas={REPLICAS}")
    journey.eventually("as many as before follow", lambda: serving.follow(POOL, REPLICAS), PATIENCE_S)


def test_a_lost_node_leaves_its_gpus_at_default_clocks_and_the_others_ready(serving: Serving) -> None:
    """Its kubelet is dead and its object gone; what ran there runs on, until nobody renews its lease."""
    journey = serving.journey
    [operator] = journey.pods("operator")
    lost = next(node for node in journey.cluster.nodes if node.name != operator.spec.node_name)
    assert kill_part(journey.cluster, lost.name, "kubelet")
    try:
        journey.kubectl("delete", "node", lost.name, "--wait=false")
        journey.eventually(
            "default clocks on the lost node",
            lambda: not any(gpu["locked_mhz"] for gpu in describe(lost.root / GPUS).values()),
            PATIENCE_S,
        )
        journey.eventually("replicas follow elsewhere", lambda: serving.follow(POOL, REPLICAS), PATIENCE_S)
        serving.keep_their_limits(POOL)
    finally:
        start_all(journey.cluster)
        journey.every_node_offers_the_socket()


def test_an_engine_without_the_plugin_is_seen_by_its_page(serving: Serving) -> None:
    journey = serving.journey
    journey.apply(without_plugin())
    journey.apply(pool(BY_PAGE, "Observe"))
    journey.eventually("its page is read", lambda: serving.true(BY_PAGE, "SignalsReady"), PATIENCE_S)
    journey.eventually("its requests are counted", lambda: serving.true(BY_PAGE, "ObjectiveKept"), PATIENCE_S)
    journey.say(serving.condition(BY_PAGE, "ObjectiveKept")[2])


def test_a_rollout_is_followed_in_the_end(serving: Serving) -> None:
    journey = serving.journey
    journey.kubectl("-n", TRAINING, "rollout", "restart", f"deployment/{POOL}")
    journey.kubectl("-n", TRAINING, "rollout", "status", f"deployment/{POOL}", f"--timeout={PATIENCE_S:.0f}s")
    journey.eventually("the next pods follow", lambda: serving.follow(POOL, REPLICAS), PATIENCE_S)
    serving.keep_their_limits(POOL)


def test_a_suspended_pool_leaves_default_clocks_and_engines_that_serve(serving: Serving) -> None:
    journey = serving.journey
    journey.kubectl("-n", TRAINING, "delete", keys.POOL_PLURAL, BY_PAGE)
    suspended = json.dumps({"spec": {"suspend": True}})
    journey.kubectl("-n", TRAINING, "patch", keys.POOL_PLURAL, POOL, "--type=merge", f"--patch={suspended}")
    journey.eventually("default clocks", lambda: not serving.locked_mhz(), PATIENCE_S)
    before = sum(one["ended"] for one in serving.told(POOL))
    journey.eventually("they serve on", lambda: sum(one["ended"] for one in serving.told(POOL)) > before, PATIENCE_S)
    assert all(not status.restart_count for pod in serving.pods(POOL) for status in pod.status.container_statuses)

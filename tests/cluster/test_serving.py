"""A Deployment of simulated vLLM under load: measured at one replica, then every clock follows its load.

The chapters depend on one another; with ``-s`` they print the journey. Engines say themselves how many requests kept
their limits; clocks are read from the simulated GPUs, outside of every pod.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from faults import kill_part, start_all
from installation import PATIENCE_S
from journey import AGENTS, CONFINED, TRAINING, Journey
from outside_gpu import GPUS
from training_job import TRAINER_IMAGE

from perseus_core import keys
from perseus_sim.gpus.shim_gpu import describe

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

POOL, BY_PAGE = "chat", "unplugged"
REPLICAS = 2
LOWEST_MHZ = 1560
"""Four clocks are tried, for some ten seconds each but the first ones."""
FIRST_TOKEN_S, PER_TOKEN_S = 0.25, 0.025
FLAGS = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true,simulatedGpus.model=h100,simulatedGpus.count=2"),
    *("--set", "webhook.enabled=true,agent.reader.enabled=true"),
)


def deployment(name: str, replicas: int, *arguments: str) -> dict[str, Any]:
    limits = f"--first-token-s={FIRST_TOKEN_S}", f"--per-token-s={PER_TOKEN_S}"
    container = {
        "name": "engine",
        "image": TRAINER_IMAGE,
        "command": ["python", "-m", "perseus_sim.serving.pod_engine", "--per-second=2.5", *limits, *arguments],
        "ports": [{"containerPort": 8000}],
        "resources": {"requests": {"cpu": "100m"}, "limits": {"nvidia.com/gpu": "1"}},
        "securityContext": CONFINED,
    }
    spec = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 2, "containers": [container]}
    labels = {"app": name, keys.LABEL_JOB: name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": TRAINING},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


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
            "clocks": {"minimumMegahertz": LOWEST_MHZ},
            "mode": mode,
        },
    }


class Serving:
    """What a user sees of pools and engines."""

    def __init__(self, journey: Journey) -> None:
        self.journey = journey

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        body = self.journey.read("-n", TRAINING, "get", keys.POOL_PLURAL, name)
        for each in (body.get("status") or {}).get("conditions", ()):
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
    journey.apply(deployment(POOL, REPLICAS))
    journey.apply(pool(POOL, "Enforce"))
    journey.eventually("engines say what they do", lambda: serving.true(POOL, "SignalsReady"), PATIENCE_S)
    journey.say(serving.condition(POOL, "SignalsReady")[2])
    assert serving.true(POOL, "Accepted")
    journey.show(f"kubectl -n {TRAINING} get sp", journey.kubectl("-n", TRAINING, "get", keys.POOL_PLURAL))


def test_one_replica_is_measured_then_all_follow_their_load(serving: Serving) -> None:
    journey = serving.journey
    journey.eventually("one replica is tried at a lower clock", lambda: len(serving.locked_mhz()) == 1, PATIENCE_S)
    journey.eventually("the engine is explained", lambda: serving.true(POOL, "ProfileReady"), PATIENCE_S)
    journey.say(serving.condition(POOL, "ProfileReady")[2])
    journey.eventually("agents hold the table", lambda: serving.true(POOL, "ClocksApplied"), PATIENCE_S)
    journey.eventually("every replica has its clock", lambda: len(serving.locked_mhz()) == REPLICAS, PATIENCE_S)
    assert min(serving.locked_mhz()) >= LOWEST_MHZ
    journey.eventually("requests keep their limits", lambda: serving.true(POOL, "ObjectiveKept"), PATIENCE_S)
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
    for replicas in (1, 3, REPLICAS):
        journey.kubectl("-n", TRAINING, "scale", "deployment", POOL, f"--replicas={replicas}")
        count = f"{replicas} replicas follow their load"
        journey.eventually(count, lambda replicas=replicas: serving.follow(POOL, replicas), PATIENCE_S)
    serving.keep_their_limits(POOL)


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
    journey.apply(deployment(BY_PAGE, 1, "--no-plugin"))
    journey.apply(pool(BY_PAGE, "Observe"))
    journey.eventually("its page is read", lambda: serving.true(BY_PAGE, "SignalsReady"), PATIENCE_S)
    journey.eventually("its requests are counted", lambda: serving.true(BY_PAGE, "ObjectiveKept"), PATIENCE_S)
    journey.say(serving.condition(BY_PAGE, "ObjectiveKept")[2])


def test_a_deleted_pool_leaves_default_clocks_and_engines_that_serve(serving: Serving) -> None:
    journey = serving.journey
    journey.kubectl("-n", TRAINING, "delete", keys.POOL_PLURAL, POOL, BY_PAGE)
    journey.eventually("default clocks", lambda: not serving.locked_mhz(), PATIENCE_S)
    before = sum(one["ended"] for one in serving.told(POOL))
    journey.eventually("they serve on", lambda: sum(one["ended"] for one in serving.told(POOL)) > before, PATIENCE_S)
    assert all(not status.restart_count for pod in serving.pods(POOL) for status in pod.status.container_statuses)

"""Prompts and tokens computed by engines of their own, in two pools: each is measured by itself, says which part it
does, and follows what is its own within its own limit. Real operator, agents, keepers and API server.

Engines are simulated. The decode engines get the same requests a moment later, with their keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.e2e.world import absent
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.live_engines import LiveEngines, start_engines
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.engine_process import CONSUMER, PRODUCER
from perseus_sim.serving.load import Chat

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
POOLS = (keys.API_GROUP, keys.API_VERSION, "default", keys.POOL_PLURAL)
ROLES = {"prompts": (PRODUCER, "Prefill"), "tokens": (CONSUMER, "Decode")}
LIMITS = {"timeToFirstToken": 0.25, "timePerOutputToken": 0.025}
LATER_S = 0.2
"""Until the first token is there, and keys and values have come."""
PATIENCE_S = 600.0
LEAST_KEPT = 0.98

pytestmark = pytest.mark.slow


def pool(name: str) -> dict[str, Any]:
    """The same words for both: what an engine does it says itself."""
    objective = {time: {"limit": f"{1000 * limit_s:.0f}ms"} for time, limit_s in LIMITS.items()}
    head = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.POOL_KIND}
    return {**head, "metadata": {"name": name}, "spec": {"objective": objective, "mode": "Enforce"}}


def test_each_part_follows_what_is_its_own_within_its_own_limit(cluster: SimulatedCluster) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*POOLS)), "the CRD is not served")
    cluster.start_operator("--status-interval-s", "0.2", "--agent-poll-s", "0.3")
    node = cluster.add_node("node-0", 4, MODELS["h100"], driver="h100")
    chat = Chat(per_second=6.0, prompt_tokens=1_000, output_tokens=150)
    loads = [chat.requests(1_800.0, seed=replica) for replica in range(2)]
    later = [[replace(one, arrival_s=one.arrival_s + LATER_S) for one in load] for load in loads]
    engines = {
        name: start_engines(cluster, node, name, load, gpu="h100", model="llama-3.1-8b", kv_role=ROLES[name][0])
        for name, load in (("prompts", loads), ("tokens", later))
    }

    def status(name: str) -> Any:
        return custom.get_namespaced_custom_object(*POOLS, name).get("status", {})

    def reached(name: str, kind: str, reason: str) -> bool:
        found = [one for one in status(name).get("conditions", []) if one["type"] == kind]
        assert found, f"{name} has no {kind}"
        assert found[0]["reason"] == reason, f"{name}: {found[0]}"
        return True

    def soon(name: str, kind: str, reason: str) -> None:
        eventually(lambda: reached(name, kind, reason), f"{kind} is not {reason}", 0.2, PATIENCE_S, (AssertionError,))

    try:
        for name in ROLES:
            cluster.apply(pool(name))
        for name in ROLES:
            soon(name, "ClocksApplied", "TableInForce")
            assert status(name)["engine"]["role"] == ROLES[name][1]
            lowest_mhz = status(name)["engine"]["lowestMegahertz"]
            assert lowest_mhz < MODELS["h100"].clocks_mhz[-1]
        for name, own in zip(ROLES, LIMITS, strict=True):
            eventually(lambda name=name: min(locked(engines[name])), f"no clock is locked for {name}", 0.02, PATIENCE_S)
            soon(name, "ObjectiveKept", "ObjectiveKept")
            assert [key for key in LIMITS if key in status(name)["attainment"]] == [own]
            assert kept(engines[name], own) >= LEAST_KEPT
        # A prompt that waits raises the clock of what computes prompts alone, and it falls again.
        changes: list[int] = []

        def swung() -> bool:
            clock_mhz = engines["prompts"].locked_mhz("prompts-0")[0]
            if changes[-1:] != [clock_mhz]:
                changes.append(clock_mhz)
            return any(
                before < at > after for before, at, after in zip(changes, changes[1:], changes[2:], strict=False)
            )

        eventually(swung, "no boost is seen", 0.02, PATIENCE_S)
    finally:
        for one in engines.values():
            one.stop()


def locked(engines: LiveEngines) -> list[int]:
    return [mhz for pod in engines.pods for mhz in engines.locked_mhz(pod)]


def kept(engines: LiveEngines, own: str) -> float:
    """The share of requests that kept the limit of the time that is theirs."""
    ended = [one for pod in engines.pods if (found := engines.results(pod)) is not None for one in found.ended]
    times = [one.first_token_s if own == "timeToFirstToken" else one.per_token_s for one in ended]
    return sum(one <= LIMITS[own] for one in times) / len(times)

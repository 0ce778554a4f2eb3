"""Engines in pods, from default clocks to clocks that follow the load: real operator, agent, keeper and API server.

Engines are simulated and say themselves what became of their requests; clocks are read from the simulated GPUs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client
from tests.e2e.world import absent
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_sim.cluster.live_engines import start_engines
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.load import Chat

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
POOL = "chat"
POOLS = (keys.API_GROUP, keys.API_VERSION, "default", keys.POOL_PLURAL)
FIRST_TOKEN_S, PER_TOKEN_S = 0.25, 0.025
LOWEST_MHZ = 1665
"""Two clocks below the highest but one: three are needed for a model."""
LEASE_TTL_S = 9


def manifest(mode: str) -> dict[str, Any]:
    limits = {
        "timeToFirstToken": {"limit": f"{1000 * FIRST_TOKEN_S:.0f}ms"},
        "timePerOutputToken": {"limit": f"{1000 * PER_TOKEN_S:.0f}ms"},
    }
    spec = {"objective": limits, "clocks": {"minimumMegahertz": LOWEST_MHZ}, "mode": mode}
    version = f"{keys.API_GROUP}/{keys.API_VERSION}"
    return {"apiVersion": version, "kind": keys.POOL_KIND, "metadata": {"name": POOL}, "spec": spec}


def test_clocks_follow_the_load_of_engines_and_are_default_when_anything_dies(cluster: SimulatedCluster) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*POOLS)), "the CRD is not served")
    flags = ("--lease-ttl-s", str(LEASE_TTL_S), "--status-interval-s", "0.2", "--agent-poll-s", "0.3")
    operator = cluster.start_operator(*flags)
    node = cluster.add_node("node-0", 3, MODELS["h100"], driver="h100")
    # One replica has two GPUs, which move together.
    requests = [Chat(per_second=3.0).requests(1_800.0, seed=replica) for replica in range(2)]
    engines = start_engines(cluster, node, POOL, requests[:1], gpu="h100", model="llama-3.1-8b", gpus_each=2)

    def condition(kind: str) -> tuple[str, str]:
        found = custom.get_namespaced_custom_object(*POOLS, POOL).get("status", {}).get("conditions", [])
        return next(((each["status"], each["message"]) for each in found if each["type"] == kind), ("Unknown", ""))

    def true(kind: str) -> bool:
        status, message = condition(kind)
        assert status == "True", f"{kind}: {message}"
        return True

    def soon(seen: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        eventually(seen, what, 0.05, patience_s, (AssertionError,))

    def locked() -> set[int]:
        return set(engines.locked_mhz(f"{POOL}-0"))

    try:
        cluster.apply(manifest("Observe"))
        soon(lambda: true("SignalsReady"), "no engine is seen")
        soon(lambda: true("ObjectiveKept"), "no request is counted")
        assert locked() == {0}, "a pool that observes sets no clock"

        cluster.apply(manifest("Enforce"))
        soon(lambda: true("ClocksApplied"), "no table is in force", 240)
        soon(lambda: len(locked()) == 1 and min(locked()) >= LOWEST_MHZ, "its GPUs are not at one clock")
        results = engines.results(f"{POOL}-0")
        assert results is not None
        kept = [one.first_token_s <= FIRST_TOKEN_S and one.per_token_s <= PER_TOKEN_S for one in results.ended]
        assert sum(kept) >= 0.98 * len(kept)

        engines.signal(f"{POOL}-0", signal.SIGSTOP)
        soon(lambda: locked() == {0}, "an engine that hangs keeps a clock")
        engines.signal(f"{POOL}-0", signal.SIGCONT)
        soon(lambda: min(locked()) >= LOWEST_MHZ, "an engine that goes on has no clock")

        operator.popen.kill()
        soon(lambda: locked() == {0}, "a clock outlives its lease")
        cluster.start_operator(*flags)
        soon(lambda: true("SignalsReady"), "the next operator sees no engine")
        soon(lambda: true("ClocksApplied"), "the next operator orders no clock", 240)
        custom.delete_namespaced_custom_object(*POOLS, POOL)
        soon(lambda: locked() == {0}, "a clock outlives its pool")
        assert engines.children[f"{POOL}-0"].running, "an engine was disturbed"
    finally:
        engines.stop()

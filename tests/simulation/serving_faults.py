"""What goes wrong with engines, and what users do with their pool."""

from __future__ import annotations

from typing import Any, Final

from tests.simulation.kinds import Fault, Kind, setting
from tests.simulation.serving import BUDGET_OF_POOL, NAMESPACE, OWN, WATTS_OF_POOL
from tests.simulation.world import World


def _node(world: World, fault: Fault) -> str:
    """The node that a fault is about, of those that have an engine."""
    return list(world.serving.nodes)[fault.place % len(world.serving.nodes)]


def _engine(world: World, fault: Fault) -> Any:
    return world.serving.engines[_node(world, fault)]


def _of_pool(change: dict[str, Any], back: dict[str, Any]) -> dict[str, Any]:
    """A user edits the ServingPool, and takes it back."""
    return {"begin": lambda w, f: w.serving.edit(change), "end": lambda w, f: w.serving.edit(back)}


def _replace_engines(world: World, fault: Fault) -> None:
    """A user rolls out another model, on one node or on all."""
    names = [_node(world, fault)] if fault.value < 0.5 else list(world.serving.nodes)
    for name in names:
        world.serving.replace(name, "model-b")


def _roll_back(world: World, fault: Fault) -> None:
    for name in world.serving.nodes:
        world.serving.replace(name, OWN)


def _limit_pool(world: World, fault: Fault) -> None:
    """An administrator limits the power of the engines, between what they need and what they like."""
    watts = int(WATTS_OF_POOL[0] + fault.value * (WATTS_OF_POOL[1] - WATTS_OF_POOL[0]))
    world.api.apply_budget(BUDGET_OF_POOL, {"watts": watts, "selector": {"namespaces": [NAMESPACE]}})


def _recreate_pool(world: World, fault: Fault) -> None:
    if not world.serving.uid:
        world.serving.apply()


def _rescale(world: World, fault: Fault) -> None:
    name = _node(world, fault)
    if name not in world.serving.pods and world.nodes[name].up:
        world.serving.start_pod(name)


KINDS_OF_SERVING: Final[dict[str, Kind]] = {
    "engine hangs": Kind(**setting(_engine, "hangs", True, False), lasts_s=(0.3, 10.0), weight=4),
    "engine lies": Kind(**setting(_engine, "lie", lambda f: f.value, None), lasts_s=(0.3, 10.0), weight=4),
    "engine killed": Kind(lambda w, f: w.serving.restart_engine(_node(w, f)), weight=3),
    "engines replaced": Kind(_replace_engines, _roll_back, (5.0, 15.0), may_stay=True),
    "prompts burst": Kind(lambda w, f: _engine(w, f).waiting.extend([w.scheduler.now_ns] * (1 + int(30 * f.value)))),
    "requests stop": Kind(**setting(_engine, "idle", True, False), lasts_s=(1.0, 15.0)),
    "pool deleted": Kind(lambda w, f: w.serving.delete(), _recreate_pool, (1.0, 10.0), may_stay=True),
    "pool suspended": Kind(**_of_pool({"suspend": True}, {"suspend": False}), lasts_s=(1.0, 10.0), may_stay=True),
    "pool recommends": Kind(**_of_pool({"mode": "Recommend"}, {"mode": "Enforce"}), lasts_s=(1.0, 10.0), may_stay=True),
    "pool's canary": Kind(**_of_pool({"mode": "Canary"}, {"mode": "Enforce"}), lasts_s=(1.0, 10.0), may_stay=True),
    "pool limited": Kind(_limit_pool, lambda w, f: w.api.delete_budget(BUDGET_OF_POOL), (5.0, 30.0), may_stay=True),
    "pool scaled": Kind(lambda w, f: w.serving.end_pod(_node(w, f)), _rescale, (1.0, 10.0), may_stay=True),
}
OF_SERVING: Final = frozenset(KINDS_OF_SERVING)

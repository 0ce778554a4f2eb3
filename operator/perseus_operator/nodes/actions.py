"""What to do next on each node, so that its agent holds the lease, the plans and the points that are wanted.

At most one action for a node, and none while one is under way: a slow agent holds up no other. Only plans and
selections do not wait for a renewal, nor a renewal for them: the lease stands meanwhile. Whatever else does is decided
once it has ended (``AwaitRenewal``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_core.serving import EngineOrders
from perseus_operator.api.conditions import Explanation
from perseus_operator.nodes.engines import orders_for
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Node
from perseus_operator.nodes.plans import StoredPlans

RENEWED_EARLY_S: Final = 2.0
"""How much earlier than it must be a lease is renewed, so that it is renewed together with others of the job."""

_ADDED_AT_ONCE: Final = 512
"""Nodes that are sent coming plans at the same time: a selection there waits for them, some tenths of a second."""


@dataclass(frozen=True)
class Acquire:
    """Take the lease on a node, for its pods as they are now."""

    node: str
    resting: RestingClock = NO_RESTING_CLOCK


@dataclass(frozen=True)
class Renew:
    """Renew the lease."""

    node: str


@dataclass(frozen=True)
class Release:
    """Return the node's GPUs to their default clocks."""

    node: str


@dataclass(frozen=True)
class Push:
    """Send the agent the plans of these stages, out of the plans of this digest."""

    node: str
    stages: frozenset[int]
    plans: str
    beside: bool = False
    """The agent goes on to follow those that it has."""


@dataclass(frozen=True)
class Select:
    """Choose a point for some pipelines."""

    node: str
    points: tuple[tuple[int, int | None], ...]
    """(dp, point); None: no plan."""
    from_iteration: int


@dataclass(frozen=True)
class Order:
    """Say at which clocks the engines on the node run."""

    node: str
    orders: EngineOrders | None
    """None: at their default clocks."""


@dataclass(frozen=True)
class AwaitRenewal:
    """Decide again as soon as the renewal under way has ended: the lease is to be changed."""

    node: str


NodeCommand = Acquire | Renew | Release | Push | Select | Order
NodeAction = NodeCommand | AwaitRenewal


@dataclass(frozen=True)
class Intent:
    """What all agents of a job shall hold."""

    plans: str | None
    """Digest of the plans to store; None: there are none."""
    wanted: Mapping[int, int | None]
    """Point of each pipeline, by dp, None: no plan for now; empty: no plan is to be followed."""
    drive: bool
    """Whether clocks may be set at all."""
    waiting: Explanation | None
    """Why no plan is to be followed."""
    resting: RestingClock = NO_RESTING_CLOCK
    """What GPUs run at while no plan wants a clock."""
    coming: str | None = None
    """Digest of plans that are to be stored beside; None: there are none."""
    stages: int = 0
    """For how many stages there are plans: none is for one that exists only in what a process says of itself."""
    orders: EngineOrders | None = None
    """For the engines in all pods; None: all run at their default clocks."""
    resting_at: Mapping[str, RestingClock] = field(default_factory=dict)
    """The same as ``resting`` of single nodes, by name, where theirs is another."""

    def resting_of(self, node: str) -> RestingClock:
        """What the GPUs of a node run at while no plan wants a clock."""
        return self.resting_at.get(node, self.resting)


def next_actions(nodes: JobNodes, intent: Intent, *, now_s: float) -> Iterator[tuple[NodeAction | None, float]]:
    """For every node that can be commanded: what to do now, if anything, and when to look at it again (monotonic)."""
    # Points are selected only once every agent stores the plans; one that does not answer keeps its old selection.
    may_select = bool(intent.wanted) and all(
        holds_plans(node, intent.plans) or _keeps_selection(node) for node in nodes.occupied
    )
    wanted = intent.wanted if may_select else {}
    from_iteration = nodes.furthest_iteration + 1
    renewed_until_s = _renewed_until_s(nodes, now_s)
    room = _ADDED_AT_ONCE - sum(node.busy for node in nodes.values())
    for node in nodes.values():
        if node.address is None or (node.busy and not node.lease_stands):
            continue
        if node.retry_at_s > now_s:
            yield None, node.retry_at_s
            continue
        if node.busy:
            may_renew = node.leased_pods is not None and not node.renewing
            due = may_renew and node.renew_at_s <= renewed_until_s
            yield Renew(node.name) if due else None, node.renew_at_s if may_renew and not due else math.inf
            continue
        fits = max(node.stages, default=0) < intent.stages
        action = _next_action(
            node,
            intent if fits else replace(intent, plans=None, coming=None),
            wanted,
            from_iteration=from_iteration,
            now_s=now_s,
            renewed_until_s=renewed_until_s,
        )
        if node.renewing and not isinstance(action, Push | Select):
            yield action and AwaitRenewal(node.name), math.inf
            continue
        if isinstance(action, Push) and action.beside:
            room -= 1
            action = action if room >= 0 else None
        leased = action is None and node.leased_pods is not None
        yield action, node.renew_at_s if leased else math.inf


def may_adopt(nodes: JobNodes, coming: str) -> bool:
    """Whether agents have the plans of this digest beside those that they follow, as far as they answer."""
    return all(_stores(node, node.plans.beside, coming) or _keeps_selection(node) for node in nodes.occupied)


def _keeps_selection(node: Node) -> bool:
    """Whether nobody waits for an agent: it does not answer, and follows what it was given before."""
    return node.fault is not None and bool(node.plans.selected)


def _renewed_until_s(nodes: JobNodes, now_s: float) -> float:
    """Leases that are to be renewed up to then are renewed now: if one is due, those that are due soon are, too.

    So the leases of a job are renewed in a few groups, and the planner looks at a job of thousands of nodes a few
    times, not once for each of them.
    """
    due = any(n.renew_at_s <= now_s and n.leased_pods is not None and not n.renewing for n in nodes.values())
    return now_s + RENEWED_EARLY_S if due else now_s


def is_applied(nodes: JobNodes, intent: Intent) -> bool:
    """Whether the agent of every rank holds the plans and the selection that are wanted."""
    with_ranks = (node for node in nodes.values() if node.ranks)
    return all(holds_plans(node, intent.plans) and _is_selected(node, intent.wanted) for node in with_ranks)


def holds_plans(node: Node, plans: str | None) -> bool:
    """Whether the agent stores the plans of this digest, to follow them, for every stage of its ranks."""
    return _stores(node, node.plans.pushed, plans)


def _stores(node: Node, stored: StoredPlans | None, plans: str | None) -> bool:
    if node.leased_pods is None or stored is None or plans is None:
        return False
    return stored.serve(node.stages, plans)


def _is_selected(node: Node, wanted: Mapping[int, int | None]) -> bool:
    selected = node.plans.selected
    return all(dp in selected and selected[dp] == wanted.get(dp) for dp in node.pipelines)


def _next_action(
    node: Node,
    intent: Intent,
    wanted: Mapping[int, int | None],
    *,
    from_iteration: int,
    now_s: float,
    renewed_until_s: float,
) -> NodeCommand | None:
    """The lease goes first: without it nothing else lasts. But a selection is urgent, and a lease that is to be renewed
    has two thirds of its time left.
    """
    if not node.pods or (not intent.drive and node.plans.driven):
        return Release(node.name)
    resting = intent.resting_of(node.name)
    held = node.leased_pods == node.pods and node.resting == resting and not node.lease_asked
    if not held or node.expires_at_s <= now_s:
        return Acquire(node.name, resting)
    following: NodeCommand | None = _next_plans(node, intent, wanted, from_iteration) if node.ranks else None
    due = node.renew_at_s <= renewed_until_s and not node.renewing
    if due and not (isinstance(following, Select) and 2 * now_s < node.renew_at_s + node.expires_at_s):
        return Renew(node.name)
    return following or _next_order(node, intent)


def _next_order(node: Node, intent: Intent) -> Order | None:
    orders = orders_for(intent.orders, [pod.uid for pod in node.pods])
    return None if node.engines.holds(orders) else Order(node.name, orders)


def _next_plans(
    node: Node, intent: Intent, wanted: Mapping[int, int | None], from_iteration: int
) -> Push | Select | None:
    """No selection waits for plans that nobody follows yet."""
    if intent.drive and intent.plans is not None and not holds_plans(node, intent.plans):
        return Push(node.name, node.stages, intent.plans)
    if wanted and not _is_selected(node, wanted):
        points = tuple((dp, wanted[dp]) for dp in sorted(node.pipelines))
        return Select(node.name, points, from_iteration)
    if wanted and intent.coming and not _stores(node, node.plans.beside, intent.coming):
        return Push(node.name, node.stages, intent.coming, beside=True)
    return None

"""Which pods are one replica: a group of a LeaderWorkerSet, whose leader's engine schedules the requests of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from perseus_operator.nodes.node import Node
from perseus_operator.objects.values import Pod

_LWS: Final = "leaderworkerset.sigs.k8s.io"
_GROUP: Final = (f"{_LWS}/name", f"{_LWS}/group-index")
_PLACE: Final = f"{_LWS}/worker-index"


def groups_of(pods: Iterable[Pod]) -> dict[str, tuple[Pod, ...]]:
    """Return the pods of each group but its leader's, by name; by the UID of the leader's pod."""
    leaders, others = dict[tuple[str, ...], str](), defaultdict[tuple[str, ...], list[Pod]](list)
    for pod in pods:
        group = tuple(pod.labels.get(label, "") for label in _GROUP)
        if not all(group):
            continue
        if pod.labels.get(_PLACE) == "0":
            leaders[group] = pod.uid
        else:
            others[group].append(pod)
    return {uid: tuple(sorted(others[group], key=lambda pod: pod.name)) for group, uid in leaders.items()}


def group_fault(leader: Pod, others: Sequence[Pod], workers: Sequence[Pod], nodes: Mapping[str, Node]) -> str:
    """Return why the GPUs of a group cannot be given one clock; empty: they can.

    Args:
        leader: its first pod.
        others: all others.
        workers: those of them whose engine says nothing.
        nodes: of the pool.
    """
    there = 1 + len(others)
    if there < leader.group_size:
        return f"{there} of the {leader.group_size} pods of its group are labelled and have a node"
    for worker in workers:
        beside = sorted(pod.name for pod in nodes[worker.node].pods if pod not in workers)
        if beside:
            return (
                f"{worker.name} of its group is on node {worker.node} with {beside[0]}: a node has one clock of a lease"
            )
    return ""

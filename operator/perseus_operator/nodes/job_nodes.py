"""The nodes of one job together: which pods run where, and what follows from all of them.

Fields are changed only here and in ``Node``, by one named method for each event: pods are observed, a node is
forgotten, processes join that count their iterations from their own start, a frontier is adopted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, ValuesView
from typing import Final

from perseus_operator.nodes.gpu import Gpu, PowerSmoothing, summed_smoothing
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.plans import NodePlans
from perseus_operator.objects.values import Pod

SLOWING_EVENTS: Final = frozenset({"THERMAL_SLOWDOWN", "POWER_BRAKE", "HARDWARE_SLOWDOWN"})
"""Kinds of GPU events that explain a slow iteration. A power cap does not: on many GPUs it is always active."""


class JobNodes(Mapping[str, Node]):
    """The nodes by name. Those without pods stay until their lease is given back."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._selections: dict[str, Mapping[int, int | None]] = {}
        """Points that nodes run, by name of the node; see ``NodePlans.selected``."""

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def values(self) -> ValuesView[Node]:
        """All nodes, without a look-up for each: there are thousands of them."""
        return self._nodes.values()

    # ---------------------------------------------------------------------------------------------------------- events

    def pods_observed(self, pods: Iterable[Pod], agents: Mapping[str, str]) -> None:
        """Pods and agents are these now.

        Args:
            pods: of the job.
            agents: host:port of the agent, by node.
        """
        by_node: dict[str, set[Pod]] = {}
        for pod in pods:
            by_node.setdefault(pod.node, set()).add(pod)
        for name in by_node.keys() | self._nodes.keys():
            address, here = agents.get(name), frozenset(by_node.get(name, ()))
            node = self._nodes.get(name)
            if node is None:
                self._nodes[name] = Node(name, address, here, NodePlans(name, self._selections))
            else:
                node.pods_observed(here)
                node.address_observed(address)

    def forget(self, node: Node) -> None:
        """Nothing on the node concerns the job any more; unless another entry has replaced it."""
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]
            self._selections.pop(node.name, None)

    def selections_outdated(self) -> None:
        """A selection names an iteration, and new processes count theirs from their own start. One step for all nodes:
        the ranks of a large job join one by one.
        """
        self._selections.clear()

    def plans_adopted(self, digest: str) -> None:
        """Plans of this digest are to be followed."""
        for node in self._nodes.values():
            node.plans.adopted(digest)

    # ------------------------------------------------------------------------------------------- what follows from it

    @property
    def occupied(self) -> list[Node]:
        """Nodes that run pods of the job."""
        return [node for node in self._nodes.values() if node.pods]

    @property
    def ranks(self) -> list[Rank]:
        """All ranks on all nodes."""
        return [rank for node in self._nodes.values() for rank in node.ranks.values()]

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs of the job's ranks, as far as agents have described them."""
        return [gpu for node in self._nodes.values() for gpu in node.rank_gpus]

    @property
    def selected(self) -> bool:
        """Whether a node runs a point."""
        return any(self._selections.values())

    @property
    def driven(self) -> bool:
        """Whether some agent follows a plan of this operator, wanted now or earlier."""
        return any(node.plans.driven for node in self._nodes.values())

    @property
    def rest_at_default(self) -> bool:
        """Whether all GPUs run at their default clocks while no plan wants another."""
        return all(node.rests_at_default for node in self._nodes.values())

    def locked_at(self, mhz: int) -> tuple[int, int]:
        """How many GPUs of leases with a clock are locked at this one, and how many the agents know of."""
        gpus = [gpu for node in self.occupied if node.clock for gpu in node.clock.gpus if gpu.uuid]
        return sum(gpu.applied_mhz == mhz for gpu in gpus), len(gpus)

    @property
    def plan_since(self) -> int:
        """First iteration that runs the points selected last."""
        return max((node.plans.from_iteration for node in self._nodes.values() if node.ranks), default=0)

    @property
    def furthest_iteration(self) -> int:
        """The furthest iteration that any rank has begun."""
        return max((node.furthest_iteration for node in self._nodes.values()), default=0)

    @property
    def power_profiles(self) -> tuple[str, ...]:
        """The workload power profiles that the driver enforces on some GPU of the job, ascending."""
        return tuple(sorted(frozenset[str]().union(*(node.power_profiles for node in self._nodes.values()))))

    @property
    def power_smoothing(self) -> PowerSmoothing:
        """What power smoothing keeps the GPUs of the job at."""
        return summed_smoothing(node.power_smoothing for node in self._nodes.values())

    @property
    def slowed_pipelines(self) -> set[int]:
        """Pipelines (dp) with a GPU that reports that something slows it."""
        nodes = self._nodes.values()
        slowed = {gpu for node in nodes for gpu, kind in node.gpu_events if kind in SLOWING_EVENTS}
        return {rank.dp for rank in self.ranks if rank.gpu_uuid in slowed} if slowed else set()

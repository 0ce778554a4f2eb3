"""Serving engines on one node: which there are, what they did, and the orders that the agent holds for them.

``NodeEngines`` is a part of ``Node``; fields are read everywhere and changed only by its named methods, one for each
event: an engine joins or leaves, pods are observed, orders are accepted, a lease is granted, renewed or lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from perseus_core.serving import EngineOrders

MOST_ENGINES: Final = 256
"""Of one node: many more than it has GPUs. Agents say what they like."""


@dataclass(frozen=True)
class Engine:
    """A process that schedules the requests of a replica, as its node's agent describes it: what it says is a claim.

    Attributes:
        pod_uid: of its pod.
        pid: of the process; 0: its metrics page is read, since it does not say by itself what it does.
        name: of the engine.
        version: in full.
        model: name and revision of the weights.
        parallelism: how layers and sequences are split, in words.
        flags: name and value of those that change a step.
        gpu_uuids: on which it runs, as the kubelet says.
    """

    pod_uid: str
    pid: int
    name: str
    version: str
    model: str
    parallelism: str
    flags: tuple[tuple[str, str], ...] = ()
    gpu_uuids: tuple[str, ...] = ()

    @property
    def by_page(self) -> bool:
        """Whether times of its requests are known between the edges of its page's buckets alone."""
        return self.pid == 0

    @property
    def process(self) -> tuple[str, int]:
        """Identifies it on its node."""
        return self.pod_uid, self.pid


@dataclass(frozen=True, kw_only=True)
class EngineWindow:
    """What one engine did in about a second, from the end of a step to the end of a step.

    Attributes:
        pod_uid: of its pod.
        pid: of the process.
        time_us: how long it is.
        clock_mhz: locked all the time; 0: the default clocks. Says nothing where ``changed``.
        changed: whether the clock changed within.
        default_us: at the default clocks.
        mhz_us: integral of the locked clock over the rest.
        running: requests that decode, mean over the steps.
        kv_share: used share of the memory for keys and values, mean over the steps.
        steps: that computed no prompt.
        steps_us: their time together.
        prompt_steps: that computed tokens of prompts.
        prompt_steps_us: their time together.
        prompt_tokens: computed.
        generated_tokens: by all requests.
        energy_mj: of all its GPUs; None: not measured.
        median_clock_mhz: that was read; 0: it was not.
        waiting: requests, at the end.
        requests: that ended.
        first_tokens: how many first tokens took a time, by its place in ``TIME_EDGES_US``.
        tokens: the same for the mean time between tokens of requests that ended.
        held_us: how long each reason held the clock.
        lengths: how many requests that ended were of which lengths, by the place of ``perseus_core.lengths``.
    """

    pod_uid: str
    pid: int
    time_us: int
    clock_mhz: int = 0
    changed: bool = False
    default_us: int = 0
    mhz_us: int = 0
    running: float = 0.0
    kv_share: float = 0.0
    steps: int = 0
    steps_us: int = 0
    prompt_steps: int = 0
    prompt_steps_us: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    energy_mj: int | None = None
    median_clock_mhz: int = 0
    waiting: int = 0
    requests: int = 0
    first_tokens: Mapping[int, int] = field(default_factory=dict)
    tokens: Mapping[int, int] = field(default_factory=dict)
    held_us: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[int, int] = field(default_factory=dict)


@dataclass
class NodeEngines:
    """The engines of one job on one node, and the orders for them. None as orders: all run at their default clocks."""

    by_process: dict[tuple[str, int], Engine] = field(default_factory=dict)
    ordered: EngineOrders | None = None
    """What the agent holds, where that is known."""
    orders_id: str = ""
    """How the agent calls what it holds; empty: nothing."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why the agent follows no engine of a pod, by the UID of the pod."""
    _certain: bool = False

    def joined(self, engine: Engine) -> None:
        """An engine has connected, or is seen again."""
        if engine.process in self.by_process or len(self.by_process) < MOST_ENGINES:
            self.by_process[engine.process] = engine

    def left(self, engine: Engine) -> None:
        """An engine has gone."""
        self.by_process.pop(engine.process, None)

    def pods_observed(self, uids: Collection[str]) -> None:
        """The node runs pods of these UIDs now."""
        self.by_process = {process: engine for process, engine in self.by_process.items() if engine.pod_uid in uids}

    def accepted(self, orders: EngineOrders | None, orders_id: str) -> None:
        """The agent holds these orders now, and calls them so."""
        self.ordered, self.orders_id, self._certain = orders, orders_id, True

    def lease_granted(self, orders_id: str, faults: Mapping[str, str]) -> None:
        """A lease says what the agent holds; of orders that were not sent under it only the name is known."""
        self.faults = faults
        if orders_id != self.orders_id or not self._certain:
            self.ordered, self.orders_id, self._certain = None, orders_id, not orders_id

    def lease_lost(self) -> None:
        """What the agent holds is no longer known."""
        self.ordered, self.orders_id, self._certain = None, "", False

    @property
    def driven(self) -> bool:
        """Whether clocks are ordered for engines here."""
        return self.ordered is not None and bool(self.ordered.clocks_mhz)

    def holds(self, orders: EngineOrders | None) -> bool:
        """Whether the agent holds exactly these orders."""
        return self._certain and self.ordered == orders


def orders_for(orders: EngineOrders | None, uids: Collection[str]) -> EngineOrders | None:
    """Return the part of a job's orders that concerns the pods of one node; None: there is none."""
    if orders is None:
        return None
    clocks_mhz = {uid: orders.clocks_mhz[uid] for uid in sorted(uids) if orders.clocks_mhz.get(uid)}
    pages = {uid: orders.pages[uid] for uid in sorted(uids) if uid in orders.pages}
    return replace(orders, clocks_mhz=clocks_mhz, pages=pages) if clocks_mhz or pages else None

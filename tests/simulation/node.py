"""A node: GPUs, a disk with the journal, a kubelet, and the processes of agent, keeper and training.

Everything of the agent above its sockets is the real code: the node's tables and threads, the threads of the GPUs,
journal, ledger and the keeper's watch. The sockets by which processes meet are left out: a training process is admitted
with the shared memory that its hello would have got, the keeper is shown the ledger, and the operator's calls come from
``tests.simulation.network``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.simulation.gpus import NODES, Driver, Gpu, open_devices
from tests.simulation.scheduler import NS, Process, Scheduler

from perseus_agent.clocks.governor import GovernorLimits
from perseus_agent.clocks.gpu_worker import WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.errors import KubeletUnavailable, PeerRefused
from perseus_agent.keeper import keeper as keeper_module
from perseus_agent.keeper import ledger as ledger_module
from perseus_agent.keeper.ledger import Ledger
from perseus_agent.keeper.link import LOOK_S
from perseus_agent.lifecycle import CHECK_S, SILENT_S, STUCK
from perseus_agent.node.node import Node
from perseus_agent.node.processes import Session
from perseus_agent.pods.pod_resources import Allocation
from perseus_agent.servers.grpc_service import AgentService
from perseus_agent.settings import Settings

RESTART_S: Final = (0.3, 2.0)
"""Until the kubelet starts a container again."""
LOOKS: Final = 4
"""Of a keeper, of which one is done while the agent cannot be silent for too long yet."""
LIMITS: Final = WorkerLimits(GovernorLimits(), sample_interval_s=0.2, watch_interval_s=0.5, hang_timeout_s=5.0)


class Disk:
    """Where the journal is; what a sync does is a fault's."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal.json"
        self.full = False
        self.slow_s = 0.0


class Kubelet:
    """Which GPUs it gave to which pods."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.given: dict[tuple[str, str], tuple[str, ...]] = {}
        self.answers = True
        self._scheduler = scheduler

    def allocation(self, namespace: str, name: str, published: Mapping[str, str]) -> Allocation | None:
        """As ``PodResources.allocation``."""
        self._scheduler.pause(self._scheduler.random.uniform(0.001, 0.01))
        if not self.answers:
            raise KubeletUnavailable("the kubelet does not answer")
        uuids = self.given.get((namespace, name))
        return None if uuids is None else Allocation(uuids, {})


class WatchedAgent:
    """As ``keeper.WatchedAgent``, of a simulated process."""

    def __init__(self, scheduler: Scheduler, process: Process, ledger: Ledger) -> None:
        self.pid = 1
        self.ledger = ledger
        self._scheduler = scheduler
        self._process = process

    def ended_within(self, seconds: float | None) -> bool:
        if seconds is not None:  # looks of which nothing can come are left out
            until_alive_s = (self.ledger._get(ledger_module._ALIVE) - self._scheduler.now_ns) / NS
            seconds = max(seconds, min(LOOKS * seconds, until_alive_s))
        return self._scheduler.ended_within(self._process, seconds)

    def kill(self) -> None:
        self._scheduler.kill(self._process)


@dataclass
class Agent:
    """One process of the agent."""

    process: Process
    ledger: Ledger
    node: Node | None = None
    service: AgentService | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    holders: set[str] = field(default_factory=set)
    """Who holds its lock: itself, and keepers."""


class SimulatedNode:
    """See the module."""

    def __init__(self, name: str, scheduler: Scheduler, folder: Path, gpus: int) -> None:
        self.name = name
        self.scheduler = scheduler
        self.driver = Driver()
        self.gpus = [Gpu(f"GPU-{name}-{number}", self.driver, energy_ns=scheduler.now_ns) for number in range(gpus)]
        NODES[name] = self.gpus
        folder.mkdir(parents=True, exist_ok=True)
        self.disk = Disk(folder)
        self.kubelet = Kubelet(scheduler)
        self.up = True
        self.boot = 1
        self.agent: Agent | None = None
        self.keeper: Process | None = None
        self.locked_by: list[Process] = []
        """Processes that hold the agent's lock."""
        self.died_ns: dict[str, int] = {}
        """When an agent or a keeper died, for promises."""
        self.watched: Callable[[SimulatedNode], None] = lambda _: None
        self.sequence = 0

    # ------------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Start what a DaemonSet runs."""
        self.start_keeper()
        self.start_agent()

    def start_agent(self) -> None:
        """Start the container of the agent."""
        if not self.up or (self.agent is not None and self.agent.process.alive):
            return
        self.sequence += 1
        process = Process(f"{self.name}/agent")
        agent = self.agent = Agent(process, Ledger.create())
        self._spawn(process, "main", lambda: self._run_agent(agent))

    def start_keeper(self) -> None:
        """Start the container of the keeper."""
        if not self.up or (self.keeper is not None and self.keeper.alive):
            return
        process = self.keeper = Process(f"{self.name}/keeper")
        self._spawn(process, "main", lambda: self._run_keeper(process))

    def kill_agent(self) -> None:
        """SIGKILL, and the kubelet starts it again."""
        if self.agent is not None and self.agent.process.alive:
            self.scheduler.kill(self.agent.process)
            self._again(self.start_agent)

    def kill_keeper(self) -> None:
        """SIGKILL, and the kubelet starts it again."""
        if self.keeper is not None and self.keeper.alive:
            self.scheduler.kill(self.keeper)
            self._again(self.start_keeper)

    def terminate_agent(self) -> None:
        """SIGTERM."""
        if self.agent is not None and self.agent.process.alive:
            self.agent.stop.set()

    def vanish(self) -> None:
        """The machine loses its power."""
        self.up = False
        self.boot += 1
        for process in (self.agent.process if self.agent else None, self.keeper):
            if process is not None:
                process.calls = 0
                self.scheduler.kill(process)
        self.locked_by.clear()
        for gpu in self.gpus:
            gpu.foreign_ns = None
            gpu.write(0, "power")

    def come_back(self) -> None:
        """It boots."""
        self.up = True
        self.start()

    def _again(self, start: Callable[[], None]) -> None:
        self.scheduler.after(self.scheduler.random.uniform(*RESTART_S), start)

    def _spawn(self, process: Process, name: str, work: Callable[[], None]) -> None:
        self.scheduler.spawn(process, name, work)

    # ------------------------------------------------------------------------------------------------ the agent

    def _run_agent(self, agent: Agent) -> None:
        """As ``lifecycle.run`` and ``_serve``, without sockets."""
        scheduler, process = self.scheduler, agent.process
        while not self._take_lock(process):
            if agent.stop.wait(0.1):
                self._exit(agent)
                return
        self._spawn(process, "keeper-link", lambda: self._link(agent))
        journal, damage = Journal.open(self.disk.journal, f"boot-{self.boot}", agent.ledger)
        devices = open_devices(self.name)
        if damage:
            journal.presume_locked(device.identity.uuid for device in devices.devices)
        hub = TelemetryHub(4_096)
        node = Node(devices, journal, self.kubelet, hub, LIMITS, kept=lambda: agent.ledger.alive_for(SILENT_S))
        node.start()
        agent.node, agent.service = node, AgentService(node, self.name, frozenset({"perseus-operator"}))
        scheduler.note(f"{self.name}: the agent serves")
        self.watched(self)
        while not agent.stop.wait(CHECK_S) and not (node.driver_replaced or node.stuck):
            pass
        agent.service = None
        agent.ledger.alive_for(10.0 + 5.0)
        node.drain(10.0)
        scheduler.note(f"{self.name}: the agent ends {'with ' + str(STUCK) if node.stuck else ''}")
        self._exit(agent)

    def _exit(self, agent: Agent) -> None:
        self._again(self.start_agent)
        self.scheduler.kill(agent.process)

    def _take_lock(self, process: Process) -> bool:
        """The kernel's lock beside the journal: held by the agent's process, and by keepers that were given it."""
        self.locked_by = [holder for holder in self.locked_by if not holder.gone]
        if self.locked_by:
            return False
        self.locked_by.append(process)
        return True

    def _link(self, agent: Agent) -> None:
        """As ``KeeperLink``: shows the ledger to whatever keeper there is, and notices its end."""
        while True:
            keeper = self.keeper
            if keeper is not None and keeper.alive and keeper not in self._watching:
                self._watching[keeper] = agent
                self.scheduler.ended_within(keeper)
                agent.ledger.watched_for(0.0)
            self.scheduler.pause(LOOK_S)

    @property
    def _watching(self) -> dict[Process, Agent]:
        return self.__dict__.setdefault("watching", {})

    # ------------------------------------------------------------------------------------------------ the keeper

    def _run_keeper(self, process: Process) -> None:
        """As ``keeper.keep``, which is shown one agent, and ends with it."""
        while process not in self._watching:
            self.scheduler.pause(keeper_module.TICK_S)
        agent = self._watching[process]
        self.locked_by.append(process)
        settings = Settings(
            insecure=True,
            devices=f"{open_devices.__module__}:open_devices:{self.name}",
            journal=str(self.disk.journal),
            proc_root=str(self.disk.journal.parent / f"boot-{self.boot}"),
        )
        boot = Path(settings.proc_root) / "sys" / "kernel" / "random"
        boot.mkdir(parents=True, exist_ok=True)
        (boot / "boot_id").write_text(f"boot-{self.boot}\n", encoding="ascii")
        watched: Any = WatchedAgent(self.scheduler, agent.process, agent.ledger)
        keeper_module._keep(watched, settings)
        self.scheduler.kill(process)
        self._again(self.start_keeper)
        if self.agent is None or not self.agent.process.alive:
            self._again(self.start_agent)

    # ------------------------------------------------------------------------------------------------ its processes

    def admit(self, session: Session) -> Process | None:
        """Have the agent take in a training process, or an engine; None: there is none that serves."""
        agent = self.agent
        if agent is None or agent.node is None or not agent.process.alive or agent.service is None:
            return None
        node = agent.node

        def admit() -> None:
            try:
                node.admit(session)
            except PeerRefused:
                session.channel.close()

        self._spawn(agent.process, "local-socket", admit)
        return agent.process

    def leave(self, session: Session, process: Process) -> None:
        """The agent's socket notices that a process has gone."""
        agent = self.agent
        if agent is not None and agent.process is process and process.alive and agent.node is not None:
            node = agent.node
            self._spawn(process, "local-socket", lambda: node.leave(session))

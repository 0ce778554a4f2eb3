"""What may go wrong in a seed, and what users do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tests.simulation.gpus import CLOCKS_MHZ, FOREIGN, REASON_OF_FOREIGN
from tests.simulation.kinds import Fault, Kind, node_of, setting
from tests.simulation.network import REQUESTS
from tests.simulation.serving_faults import KINDS_OF_SERVING
from tests.simulation.training import forge, ring
from tests.simulation.world import BUDGET, NAMESPACE, PLANNED_W, World

from perseus_agent.devices.base import EventReason

MISTAKES: Final[tuple[dict[str, Any], ...]] = (
    {"objective": {"type": "MaxSlowdown", "maxSlowdown": "-5%"}},
    {"objective": {"type": "FixedClock", "clockMegahertz": -1}},
    {"mode": "Sometimes"},
    {"nonsense": 1},
)
"""Each of one field."""


def _replica(world: World, fault: Fault) -> Any:
    return world.replicas[fault.place % len(world.replicas)]


def _gpu(world: World, fault: Fault) -> Any:
    gpus = [gpu for node in world.nodes.values() for gpu in node.gpus]
    return gpus[fault.place % len(gpus)]


def _name(world: World, fault: Fault) -> tuple[str, int]:
    number = fault.place % len(world.training)
    return f"job-{number}", number


def _jobs_on(world: World, node: Any) -> list[tuple[str, int]]:
    """Training jobs of a node."""
    names = enumerate(world.training)
    return [(name, number) for number, name in names if node.name in world.nodes_of[name]]


def _link(world: World, fault: Fault) -> Any:
    links = [world.network.link(replica.name, node) for replica in world.replicas for node in world.nodes]
    return links[fault.place % len(links)]


def _hold(world: World, fault: Fault) -> None:
    """A share of what is sent to a node, or by it, is seconds late."""
    for replica in world.replicas:
        world.network.link(replica.name, node_of(world, fault).name).held = 0.2 + 0.5 * fault.value


def _let_go(world: World, fault: Fault) -> None:
    for replica in world.replicas:
        world.network.link(replica.name, node_of(world, fault).name).held = 0.0


def _connection(world: World, fault: Fault) -> Any:
    return _replica(world, fault).api


def _disk(world: World, fault: Fault) -> Any:
    return node_of(world, fault).disk


def _kill_operators(world: World, fault: Fault) -> None:
    """All replicas are killed, and none is started for a while: their nodes are gone, say."""
    for replica in world.replicas:
        world.scheduler.kill(replica.process)


def _start_operators(world: World, fault: Fault) -> None:
    for replica in world.replicas:
        world.start_again(replica)


def _stop_agent(world: World, fault: Fault) -> None:
    agent = node_of(world, fault).agent
    if agent is not None:
        world.scheduler.stop(agent.process)


def _continue_agent(world: World, fault: Fault) -> None:
    agent = node_of(world, fault).agent
    if agent is not None and agent.process.alive:
        world.scheduler.resume(agent.process)


def _vanish(world: World, fault: Fault) -> None:
    node = node_of(world, fault)
    if node.up:
        node.vanish()
        world.serving.end_engine(node.name)
        for job, _ in _jobs_on(world, node):  # a rank is gone: its job ends, and its user starts it again
            world.training[job].end()


def _come_back(world: World, fault: Fault) -> None:
    node = node_of(world, fault)
    node.come_back()
    world.serving.start_engine(node.name)
    for name, number in _jobs_on(world, node):
        if not world.training[name].ranks:
            again(world, name, number)


def _silence(world: World, fault: Fault) -> None:
    _connection(world, fault).silent = True


def _speak(world: World, fault: Fault) -> None:
    replica = _replica(world, fault)
    replica.api.silent = False
    if replica.connection is not None:
        replica.connection.relist()


def _kill_training(world: World, fault: Fault) -> None:
    name, number = _name(world, fault)
    if world.training[name].ranks:
        world.training[name].end()
        _start_later(world, name, number, 10 * fault.value)


def _start_later(world: World, name: str, number: int, seconds: float) -> None:
    """A user starts what has ended again."""

    def start() -> None:
        if not world.training[name].ranks:
            again(world, name, number)

    world.scheduler.after(seconds, start)


def _fail_gpus(world: World, fault: Fault) -> None:
    """GPUs fail: the driver refuses, and with it the training ends. Its user looks at it before it is started again."""
    node = node_of(world, fault)
    node.driver.refuses = True
    _end_processes(world, node, 4 + 16 * fault.value)


def _evict(world: World, fault: Fault) -> None:
    """A node kills what runs on it: out of memory, say."""
    node = node_of(world, fault)
    _end_processes(world, node, 10 * fault.value)
    node.kill_keeper()
    node.kill_agent()


def _end_processes(world: World, node: Any, again_s: float) -> None:
    """What uses GPUs of a node ends, and is started again: training after so long."""
    for name, number in _jobs_on(world, node):
        if world.training[name].ranks:
            world.training[name].end()
            _start_later(world, name, number, again_s)
    world.serving.restart_engine(node.name)


def again(world: World, name: str, number: int) -> None:
    """A user starts a job's pods again, where the nodes are there."""
    if all(world.nodes[node].up for node in world.nodes_of[name]) and world.has_pods(name):
        world.start_training(name, number)


def _delete_pods(world: World, fault: Fault) -> None:
    name, _ = _name(world, fault)
    world.end_training(name)


def _start_pods(world: World, fault: Fault) -> None:
    name, number = _name(world, fault)
    if all(world.nodes[node].up for node in world.nodes_of[name]) and not world.training[name].ranks:
        world.start_training(name, number)


def _delete_job(world: World, fault: Fault) -> None:
    world.delete_job(_name(world, fault)[0])


def _recreate_job(world: World, fault: Fault) -> None:
    name, _ = _name(world, fault)
    if name not in world.uids:
        world.apply_job(name)


def _observe(world: World, fault: Fault) -> None:
    world.edit_job(_name(world, fault)[0], {"mode": "Recommend"})


def _enforce(world: World, fault: Fault) -> None:
    world.edit_job(_name(world, fault)[0], {"mode": "Enforce"})


def _waver(world: World, fault: Fault) -> None:
    """A user changes his mind about every second."""
    name, every_s = _name(world, fault)[0], 0.7 + 0.8 * fault.value
    for turn in range(int(fault.lasts_s / every_s)):
        mode = "Enforce" if turn % 2 else "Recommend"
        world.scheduler.after(turn * every_s, partial(world.edit_job, name, {"mode": mode}))


def _suspend(world: World, fault: Fault) -> None:
    world.edit_job(_name(world, fault)[0], {"suspend": True})


def _unsuspend(world: World, fault: Fault) -> None:
    world.edit_job(_name(world, fault)[0], {"suspend": False})


def _edit(world: World, fault: Fault) -> None:
    name, number = _name(world, fault)
    if number % 2:
        clock = CLOCKS_MHZ[30 + int(fault.value * 40)]
        world.edit_job(name, {"objective": {"type": "FixedClock", "clockMegahertz": clock}})
    else:
        share = f"{1 + int(fault.value * 10)}%"
        world.edit_job(name, {"objective": {"type": "MaxSlowdown", "maxSlowdown": share}})


def _misedit(world: World, fault: Fault) -> None:
    """A user writes what no PerseusJob may say, past the rules of the API server."""
    world.misedit_job(_name(world, fault)[0], MISTAKES[int(fault.value * len(MISTAKES))])


def _correct(world: World, fault: Fault) -> None:
    world.edit_job(_name(world, fault)[0], {})


def _limit(world: World, fault: Fault) -> None:
    """An administrator limits the power of the jobs that are planned, between what they need and what they like."""
    watts = int(PLANNED_W[0] + fault.value * (PLANNED_W[1] - PLANNED_W[0]))
    world.api.apply_budget(BUDGET, {"watts": watts, "selector": {"namespaces": [NAMESPACE]}})


def _foreign(world: World, fault: Fault) -> None:
    """Another program locks the GPU, above what we did or below; the driver may have a reason for something else."""
    gpu = _gpu(world, fault)
    ours = gpu.locked_mhz or CLOCKS_MHZ[-1]
    above = [mhz for mhz in CLOCKS_MHZ if mhz > ours + 100]
    others = above if above and fault.value < 0.8 else [mhz for mhz in CLOCKS_MHZ[20:] if abs(mhz - ours) > 100]
    clock = others[int(fault.value * len(others))]
    gpu.foreign_ns = world.scheduler.now_ns
    gpu.steady_before_foreign = world.scheduler.now_ns - gpu.since_ns > 4e9
    for node in world.nodes.values():
        if gpu in node.gpus and node.agent is not None and node.agent.node is not None:
            gpu.writes_before_foreign = node.agent.node.workers[gpu.uuid].governor.writes
    gpu.reasons = REASON_OF_FOREIGN
    gpu.write(clock, FOREIGN)


def _domestic(world: World, fault: Fault) -> None:
    gpu = _gpu(world, fault)
    gpu.reasons = EventReason.NONE
    gpu.foreign_ns = None
    if gpu.writer == FOREIGN:
        gpu.write(0, "foreign gone")


def _jump(world: World, fault: Fault) -> None:
    world.scheduler.wall_offset_ns += int((fault.value - 0.5) * 7200e9)


def _stranger(world: World, fault: Fault) -> None:
    """A process of the cluster that is no operator calls an agent: each of its methods."""
    jobs = list(world.uids.values()) or ["nobody"]
    for name, kind in REQUESTS.items():
        request: Any = kind()
        if name != "DescribeNode":
            request.job_uid = jobs[fault.place % len(jobs)]
        if "epoch" in request.DESCRIPTOR.fields_by_name:
            request.epoch = 1_000
        world.network.call_as_stranger(node_of(world, fault), name, request)


def _forge(world: World, fault: Fault) -> None:
    """A rank writes into its shared memory what it likes."""
    ranks = world.training[_name(world, fault)[0]].ranks
    if ranks:
        rank = ranks[fault.place % len(ranks)]
        world.scheduler.spawn(rank.process, "forge", lambda: forge(rank, fault.value, fault.lasts_s))


def _ring(world: World, fault: Fault) -> None:
    """A rank rings again and again, and what its agent reads then is long."""
    ranks = world.training[_name(world, fault)[0]].ranks
    if ranks:
        rank = ranks[fault.place % len(ranks)]
        world.scheduler.spawn(rank.process, "ring", lambda: ring(rank, fault.value, fault.lasts_s))


def _take_right(world: World, fault: Fault) -> None:
    """An administrator takes the right to see jobs from a viewer of the page, or his token."""
    right = fault.value < 0.5
    world.rights.change(world.scheduler.now_ns, may_see=not right, known=right)


def _tear(world: World, fault: Fault) -> None:
    """The agent is killed, and what it wrote last is only half on the disk."""
    node = node_of(world, fault)
    node.kill_agent()
    if node.disk.journal.exists():
        data = node.disk.journal.read_bytes()
        node.disk.journal.write_bytes(data[: int(len(data) * fault.value)])


KINDS: Final[dict[str, Kind]] = {
    "agent killed": Kind(lambda w, f: node_of(w, f).kill_agent(), weight=4),
    "agent terminated": Kind(lambda w, f: node_of(w, f).terminate_agent()),
    "agent stopped": Kind(_stop_agent, _continue_agent, (0.2, 12.0), weight=3),
    "keeper killed": Kind(lambda w, f: node_of(w, f).kill_keeper()),
    "journal torn": Kind(_tear),
    "operator killed": Kind(lambda w, f: w.kill_operator(_replica(w, f)), weight=3),
    "operator stopped": Kind(
        lambda w, f: w.scheduler.stop(_replica(w, f).process),
        lambda w, f: w.scheduler.resume(_replica(w, f).process),
        (0.5, 15.0),
    ),
    "operators gone": Kind(_kill_operators, _start_operators, (0.5, 15.0), weight=3),
    "link cut": Kind(**setting(_link, "cut", True, False), lasts_s=(0.5, 20.0), weight=3),
    "link blinks": Kind(**setting(_link, "cut", True, False), lasts_s=(0.2, 1.2), weight=3),
    "messages lost": Kind(**setting(_link, "lost", lambda f: 0.05 + 0.5 * f.value, 0.0), lasts_s=(1.0, 15.0)),
    "messages doubled": Kind(**setting(_link, "doubled", lambda f: f.value, 0.0), lasts_s=(1.0, 15.0)),
    "messages late": Kind(**setting(_link, "slow", lambda f: 1 + 300 * f.value, 1.0), lasts_s=(1.0, 10.0)),
    "messages held": Kind(_hold, _let_go, (3.0, 15.0), weight=3),
    "API away": Kind(**setting(_connection, "away", True, False), lasts_s=(1.0, 20.0)),
    "API fails": Kind(**setting(_connection, "failing", lambda f: 0.7 * f.value, 0.0), lasts_s=(1.0, 20.0)),
    "API stale": Kind(**setting(_connection, "stale_s", lambda f: 10 * f.value, 0.0), lasts_s=(5.0, 60.0)),
    "watch silent": Kind(_silence, _speak, (1.0, 20.0)),
    "watch repeats": Kind(**setting(_connection, "repeating", lambda f: f.value, 0.0), lasts_s=(1.0, 20.0)),
    "disk full": Kind(**setting(_disk, "full", True, False), lasts_s=(1.0, 10.0)),
    "disk slow": Kind(
        **setting(lambda w, f: node_of(w, f).disk, "slow_s", lambda f: 3 * f.value, 0.0), lasts_s=(1.0, 15.0)
    ),
    "driver hangs": Kind(**setting(lambda w, f: node_of(w, f).driver, "hangs", True, False), lasts_s=(0.3, 12.0)),
    "driver refuses": Kind(**setting(lambda w, f: node_of(w, f).driver, "refuses", True, False), lasts_s=(0.1, 4.0)),
    "GPU fails": Kind(_fail_gpus, lambda w, f: setattr(node_of(w, f).driver, "refuses", False), (0.1, 4.0)),
    "node out of memory": Kind(_evict),
    "driver slow": Kind(**setting(lambda w, f: node_of(w, f).driver, "slow", 8.0, 1.0), lasts_s=(1.0, 10.0)),
    "GPUs lost": Kind(**setting(lambda w, f: node_of(w, f).driver, "lost", True, False), lasts_s=(0.5, 8.0), weight=1),
    "foreign lock": Kind(_foreign, _domestic, (4.0, 15.0)),
    "node vanishes": Kind(_vanish, _come_back, (3.0, 10.0), weight=1),
    "kubelet away": Kind(**setting(lambda w, f: node_of(w, f).kubelet, "answers", False, True), lasts_s=(1.0, 15.0)),
    "training killed": Kind(_kill_training, weight=3),
    "pods deleted": Kind(_delete_pods, _start_pods, (1.0, 10.0), may_stay=True),
    "job deleted": Kind(_delete_job, _recreate_job, (1.0, 10.0), may_stay=True),
    "job recommends": Kind(_observe, _enforce, (1.0, 10.0), may_stay=True),
    "job wavers": Kind(_waver, _enforce, (3.0, 10.0), weight=3),
    "job suspended": Kind(_suspend, _unsuspend, (1.0, 10.0), may_stay=True),
    "job edited": Kind(_edit, weight=3),
    "job misedited": Kind(_misedit, _correct, (1.0, 10.0), may_stay=True),
    "power limited": Kind(_limit, lambda w, f: w.api.delete_budget(BUDGET), (5.0, 30.0), may_stay=True, weight=4),
    "stranger calls": Kind(_stranger),
    "rank forges": Kind(_forge, lambda w, f: None, (1.0, 15.0), weight=6),
    "rank rings": Kind(_ring, lambda w, f: None, (3.0, 15.0)),
    "counter stops": Kind(**setting(_gpu, "counts", False, True), lasts_s=(1.0, 15.0), may_stay=True),
    "right taken away": Kind(_take_right, lambda w, f: w.rights.change(w.scheduler.now_ns), (5.0, 30.0), may_stay=True),
    "solvers lie": Kind(**setting(lambda w, f: w, "solvers_lie", lambda f: f.value, None), lasts_s=(1.0, 15.0)),
    "clock set": Kind(_jump, weight=1),
    **KINDS_OF_SERVING,
}


def inject(world: World, faults: list[Fault], begun: Callable[[Fault], None], ended: Callable[[Fault], None]) -> None:
    """Have them happen."""
    for fault in faults:
        kind = KINDS[fault.kind]

        def begin(fault: Fault = fault, kind: Kind = kind) -> None:
            world.scheduler.note(f"FAULT {fault}")
            begun(fault)
            kind.begin(world, fault)

        def end(fault: Fault = fault, kind: Kind = kind) -> None:
            world.scheduler.note(f"END OF {fault}")
            ended(fault)
            assert kind.end is not None
            kind.end(world, fault)

        world.scheduler.after(fault.at_s, begin)
        if kind.end is not None and fault.lasts_s:
            world.scheduler.after(fault.at_s + fault.lasts_s, end)

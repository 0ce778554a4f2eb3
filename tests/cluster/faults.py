"""Faults of a cluster: a call begins a fault, and the function that it returns ends it.

A fault waits only for its own actions; the test waits for the reaction of the product. All faults stay within the
namespaces and control groups of the cluster.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from installation import PROGRAMS, find
from training_job import FAST_CLOCK

from local_cluster.cluster import Cluster
from local_cluster.machine import CONTROL_PLANE, Machine
from perseus_sim.cluster.pki import Authority

Pods = dict[str, Any]
End = Callable[[], None]
_TABLE = "perseus_fault"


def signal_role(pods: Pods, role: str, number: signal.Signals) -> list[int]:
    """Send a signal to the main process of a role, if it runs."""
    found = find(pods[role], PROGRAMS[role.partition(" ")[0]])
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
    return found


def kill_role(pods: Pods, role: str) -> End | None:
    return nothing if signal_role(pods, role, signal.SIGKILL) else None


def freeze_role(pods: Pods, role: str) -> End | None:
    """Stop a process with SIGSTOP: it does nothing, and its connections stay open."""
    frozen = signal_role(pods, role, signal.SIGSTOP)

    def thaw() -> None:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return thaw if frozen else None


def kill_part(cluster: Cluster, machine: str, component: str) -> End | None:
    return nothing if cluster.signal(machine, component, signal.SIGKILL) else None


def nothing() -> None:
    """End a kill: ``start_all`` starts the parts that nothing else starts again."""


def start_all(cluster: Cluster) -> None:
    """Start every part of the cluster that does not run, in the order of their dependencies."""
    for machine in (cluster.control_plane, *cluster.nodes):
        for component in cluster.components(machine.name):
            cluster.start(machine.name, component)


def filter_pods(node: Machine, *rules: str) -> End:
    """Filter the packets to and from a node's pods, by rules in the node's own network."""
    node.run("nft", f"add table inet {_TABLE}")
    node.run("nft", f"add chain inet {_TABLE} c {{ type filter hook forward priority -50; }}")
    for rule in rules:
        node.run("nft", f"add rule inet {_TABLE} c {rule}")
    return lambda: end_filter(node)


def _ip(address: str) -> str:
    """Return nft's name for an address's family."""
    return "ip6" if ":" in address else "ip"


def end_filter(node: Machine) -> None:
    node.run("nft", f"delete table inet {_TABLE}", check=False)


def cut_off(node: Machine, address: str) -> End:
    """Drop all packets between a node's pods and an address."""
    ip = _ip(address)
    return filter_pods(node, f"{ip} saddr {address} drop", f"{ip} daddr {address} drop")


def cut_off_from_all(node: Machine, address: str) -> End:
    """Drop all packets of one pod of this node, those to the API server and to the node itself as well."""
    ip, chains = _ip(address), ("forward", "input", "output")
    node.run("nft", f"add table inet {_TABLE}")
    for hook in chains:
        node.run("nft", f"add chain inet {_TABLE} {hook} {{ type filter hook {hook} priority -50; }}")
        for side in ("saddr", "daddr"):
            node.run("nft", f"add rule inet {_TABLE} {hook} {ip} {side} {address} drop")
    return lambda: end_filter(node)


def lose(node: Machine, percent: int) -> End:
    """Drop a share of the packets to and from a node's pods."""
    return filter_pods(node, f"numgen random mod 100 < {percent} drop")


def delay(node: Machine, source: str, target: str, port: int, delay_ms: int) -> End:
    """Delay the requests of a source to a pod of this node. It uses a proxy, because not every kernel has netem."""
    # Under another name than sys.executable, because the node's process 1 may run that program too.
    proxy, python = 19_999, "python3"
    node.spawn("delay", [python, str(Path(__file__).with_name("slow_proxy.py")), str(proxy), target, str(port),
                         str(delay_ms)])  # fmt: skip
    ip = _ip(target)
    drop_connections = ["conntrack", "-D", "-f", "ipv6" if ip == "ip6" else "ipv4", "-p", "tcp", "--dport", str(port)]
    node.run("nft", f"add table inet {_TABLE}")
    node.run("nft", f"add chain inet {_TABLE} c {{ type nat hook prerouting priority -150; }}")
    toward = f"{ip} saddr {source} {ip} daddr {target} tcp dport {port}"
    node.run("nft", f"add rule inet {_TABLE} c {toward} redirect to :{proxy}")
    # Existing connections do not use the new rule, so they must be made again.
    node.run(*drop_connections, check=False)

    def end() -> None:
        end_filter(node)
        node.signal(python, signal.SIGKILL)
        node.run(*drop_connections, check=False)

    return end


def set_certificates(core: Any, namespace: str, authority: Authority, **more: Any) -> None:
    """Write new certificates of operator and agents into their two Secrets, as an administrator does."""
    for component in ("operator", "agent"):
        name = f"perseus-{component}"
        pair = authority.issue(name, hosts=(name,), client=True, **more)
        contents = {"ca.crt": authority.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}
        data = {key: b64encode(value).decode() for key, value in contents.items()}
        core.patch_namespaced_secret(f"{name}-tls", namespace, {"data": data})


def set_clock_ahead(node: Machine) -> End:
    """Set the wall clock one hour ahead for agents and trainers that start on this node until the fault ends.

    All of them have LD_PRELOAD with a path in a folder that they mount anyway. Where the library does not exist, the
    loader continues without it. libfaketime cannot be used: its sleep fails with the arguments of Python 3.11.
    """
    library = node.root / FAST_CLOCK
    source = Path(__file__).with_name("fast_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", library, source], check=True)
    return lambda: library.unlink(missing_ok=True)


def exhaust_memory(pods: Pods, role: str) -> None:
    """Make the kernel kill a role's process because its container has no memory left.

    A process of the test joins the container's control group and allocates memory up to the limit. ``oom_score_adj``
    makes the kernel choose the role's process.
    """
    (victim,) = find(pods[role], PROGRAMS[role.partition(" ")[0]])
    Path(f"/proc/{victim}/oom_score_adj").write_text("1000", encoding="ascii")
    script = (
        "import sys\n"
        "open(sys.argv[1], 'w').write('0')\n"
        "taken = []\n"
        "while True: taken.append(bytearray(b'x' * (1 << 20)))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(memory_group(victim) / "cgroup.procs")], check=False)


def memory_group(pid: int) -> Path:
    """Return the control group that limits the memory of a process."""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / path.lstrip("/")


def any_fault(cluster: Cluster, pods: Pods, dice: random.Random) -> tuple[str, End]:
    """Begin a random fault of those that end at once; return its name and the function that ends it."""
    while True:
        node = dice.choice(cluster.nodes)
        part = dice.choice(["kubelet", "containerd", "kube-proxy"])
        plane = dice.choice(["kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler"])
        agent, keeper, trainer = (f"{role} of {node.name}" for role in ("agent", "keeper", "trainer"))
        operator = pods["operator"].status.pod_ip
        begin: dict[str, Callable[[], End | None]] = {
            "kill the operator": lambda: kill_role(pods, "operator"),
            "freeze the operator": lambda: freeze_role(pods, "operator"),
            f"kill the {agent}": lambda agent=agent: kill_role(pods, agent),
            f"freeze the {agent}": lambda agent=agent: freeze_role(pods, agent),
            f"kill the {keeper}": lambda keeper=keeper: kill_role(pods, keeper),
            f"freeze the {keeper}": lambda keeper=keeper: freeze_role(pods, keeper),
            f"kill the {trainer}": lambda trainer=trainer: kill_role(pods, trainer),
            f"kill {part} of {node.name}": lambda node=node, part=part: kill_part(cluster, node.name, part),
            f"kill {plane}": lambda plane=plane: kill_part(cluster, CONTROL_PLANE, plane),
            f"cut {node.name} off from the operator": lambda node=node, operator=operator: cut_off(node, operator),
            f"lose 10 % of the packets of {node.name}": lambda node=node: lose(node, 10),
        }
        which = dice.choice(list(begin))
        if end := begin[which]():
            return which, end
        # The part is already down: draw again.

"""What can befall a cluster: each fault begins with a call and ends with the call that it returns.

Used by ``test_faults``. A fault waits for nothing but what it does itself; who waits for the product is the test. All
of it lies in namespaces and control groups of the cluster.
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

from stage import FAST_CLOCK, PROGRAMS, find

from local_cluster.cluster import CONTROL_PLANE, Cluster
from local_cluster.machine import Machine
from perseus_sim.cluster.pki import Authority

Cast = dict[str, Any]
End = Callable[[], None]
_TABLE = "perseus_fault"


def signal_role(cast: Cast, role: str, number: signal.Signals) -> list[int]:
    """Send a signal to the main process of a role, if it runs."""
    found = find(cast[role], PROGRAMS[role.partition(" ")[0]])
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
    return found


def kill_role(cast: Cast, role: str) -> End | None:
    return nothing if signal_role(cast, role, signal.SIGKILL) else None


def freeze_role(cast: Cast, role: str) -> End | None:
    """It neither works nor hangs up: the worst kind of slow."""
    frozen = signal_role(cast, role, signal.SIGSTOP)

    def thaw() -> None:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return thaw if frozen else None


def kill_part(cluster: Cluster, machine: str, component: str) -> End | None:
    return nothing if cluster.signal(machine, component, signal.SIGKILL) else None


def nothing() -> None:
    """What has to be done after a kill: it is ``start_all`` that starts what nobody else does."""


def start_all(cluster: Cluster) -> None:
    """Start whatever of the cluster does not run, in the order that they need each other."""
    for machine in (cluster.control_plane, *cluster.nodes):
        for component in cluster.components(machine.name):
            cluster.start(machine.name, component)


def filter_pods(node: Machine, *rules: str) -> End:
    """Rules for what goes to and from the pods of a node, in its own network."""
    node.run("nft", f"add table inet {_TABLE}")
    node.run("nft", f"add chain inet {_TABLE} c {{ type filter hook forward priority -50; }}")
    for rule in rules:
        node.run("nft", f"add rule inet {_TABLE} c {rule}")
    return lambda: end_filter(node)


def _ip(address: str) -> str:
    """What nft calls an address's family."""
    return "ip6" if ":" in address else "ip"


def end_filter(node: Machine) -> None:
    node.run("nft", f"delete table inet {_TABLE}", check=False)


def cut_off(node: Machine, address: str) -> End:
    """Nothing passes between a node's pods and an address."""
    ip = _ip(address)
    return filter_pods(node, f"{ip} saddr {address} drop", f"{ip} daddr {address} drop")


def lose(node: Machine, percent: int) -> End:
    """Some packets to and from a node's pods are lost."""
    return filter_pods(node, f"numgen random mod 100 < {percent} drop")


def delay(node: Machine, source: str, target: str, port: int, delay_ms: int) -> End:
    """What a source asks of a pod of this node takes longer, by a proxy: not every kernel has netem."""
    # By a name of its own: the node's process 1 may well run the same Python as we do.
    proxy, python = 19_999, "python3"
    node.spawn("delay", [python, str(Path(__file__).with_name("slow_proxy.py")), str(proxy), target, str(port),
                         str(delay_ms)])  # fmt: skip
    ip = _ip(target)
    forget = ["conntrack", "-D", "-f", "ipv6" if ip == "ip6" else "ipv4", "-p", "tcp", "--dport", str(port)]
    node.run("nft", f"add table inet {_TABLE}")
    node.run("nft", f"add chain inet {_TABLE} c {{ type nat hook prerouting priority -150; }}")
    toward = f"{ip} saddr {source} {ip} daddr {target} tcp dport {port}"
    node.run("nft", f"add rule inet {_TABLE} c {toward} redirect to :{proxy}")
    # Connections that are there go on as they are: have them made anew.
    node.run(*forget, check=False)

    def end() -> None:
        end_filter(node)
        node.signal(python, signal.SIGKILL)
        node.run(*forget, check=False)

    return end


def set_certificates(core: Any, namespace: str, authority: Authority, **more: Any) -> None:
    """Give operator and agents new certificates, as whoever keeps the two Secrets would."""
    for who in ("operator", "agent"):
        name = f"perseus-{who}"
        pair = authority.issue(name, hosts=(name,), client=True, **more)
        contents = {"ca.crt": authority.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}
        data = {key: b64encode(value).decode() for key, value in contents.items()}
        core.patch_namespaced_secret(f"{name}-tls", namespace, {"data": data})


def mislead(node: Machine) -> End:
    """Whichever agent or trainer starts on this node from now on lives an hour ahead, until the end is called.

    The library lies in a folder that they have anyway, and all are told to preload it: where it is not, the loader goes
    on without. It is not libfaketime: that one's sleep refuses what Python 3.11 asks of it.
    """
    library = node.root / FAST_CLOCK
    source = Path(__file__).with_name("fast_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", library, source], check=True)
    return lambda: library.unlink(missing_ok=True)


def exhaust_memory(cast: Cast, role: str) -> None:
    """Let the kernel end a role's process because its container has used up its memory.

    A process of ours joins the container's group and takes memory up to the limit; the kernel is told whom to prefer.
    """
    (victim,) = find(cast[role], PROGRAMS[role.partition(" ")[0]])
    Path(f"/proc/{victim}/oom_score_adj").write_text("1000", encoding="ascii")
    script = (
        "import sys\n"
        "open(sys.argv[1], 'w').write('0')\n"
        "taken = []\n"
        "while True: taken.append(bytearray(b'x' * (1 << 20)))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(memory_group(victim) / "cgroup.procs")], check=False)


def memory_group(pid: int) -> Path:
    """The control group that bounds the memory of a process."""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / path.lstrip("/")


def any_fault(cluster: Cluster, cast: Cast, dice: random.Random) -> tuple[str, End]:
    """Begin a fault of those that take no longer than they are let; says which."""
    while True:
        node = dice.choice(cluster.nodes)
        part = dice.choice(["kubelet", "containerd", "kube-proxy"])
        plane = dice.choice(["kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler"])
        agent, trainer, operator = f"agent of {node.name}", f"trainer of {node.name}", cast["operator"].status.pod_ip
        begin: dict[str, Callable[[], End | None]] = {
            "kill the operator": lambda: kill_role(cast, "operator"),
            "freeze the operator": lambda: freeze_role(cast, "operator"),
            f"kill the {agent}": lambda agent=agent: kill_role(cast, agent),
            f"freeze the {agent}": lambda agent=agent: freeze_role(cast, agent),
            f"kill the {trainer}": lambda trainer=trainer: kill_role(cast, trainer),
            f"kill {part} of {node.name}": lambda node=node, part=part: kill_part(cluster, node.name, part),
            f"kill {plane}": lambda plane=plane: kill_part(cluster, CONTROL_PLANE, plane),
            f"cut {node.name} off from the operator": lambda node=node, operator=operator: cut_off(node, operator),
            f"lose 10 % of the packets of {node.name}": lambda node=node: lose(node, 10),
        }
        which = dice.choice(list(begin))
        if end := begin[which]():
            return which, end
        # What is down already cannot be struck down: draw again.

"""The network of a cluster: a bridge in the control plane's machine, a cable to each node, routes to the nodes' pods.

Used by ``cluster``. All of it lives in the machines' network namespaces and ends with them; the machine that they run
on has no part in it, so there is no way out to the internet either. Pods are routed, not bridged (CNI plugin ptp):
a bridge would need br_netfilter for Services between pods of one node.
"""

from __future__ import annotations

from local_cluster.machine import Machine

HUB = "172.30.0.1"
DNS = "10.96.0.10"
PODS = "10.88.0.0/16"


def address(number: int) -> str:
    """Of node ``number``, counted from 1."""
    return f"172.30.0.{10 + number}"


def pods(number: int) -> str:
    """The range of its pods."""
    return f"10.88.{number}.0/24"


def build_hub(hub: Machine) -> None:
    """The bridge, unless it is there."""
    if not _exists(hub, "br0"):
        _ip(hub, "link", "add", "br0", "type", "bridge")
    _ip(hub, "address", "replace", f"{HUB}/24", "dev", "br0")
    _ip(hub, "link", "set", "br0", "up")


def connect(hub: Machine, nodes: list[Machine]) -> None:
    """Cables and routes between all nodes, where they are missing."""
    for number, node in enumerate(nodes, start=1):
        if not _exists(node, "eth0"):
            port = f"port{number}"
            if _exists(hub, port):  # the other end went with a node that is gone; this one follows in a moment
                _ip(hub, "link", "delete", port)
            _ip(hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
            _ip(hub, "link", "set", port, "master", "br0", "up")
        _ip(node, "address", "replace", f"{address(number)}/24", "dev", "eth0")
        _ip(node, "link", "set", "eth0", "up")
        _ip(node, "route", "replace", "default", "via", HUB)
    for number in range(1, len(nodes) + 1):
        for other in (hub, *(node for each, node in enumerate(nodes, start=1) if each != number)):
            _ip(other, "route", "replace", pods(number), "via", address(number))


def _ip(machine: Machine, *arguments: str) -> None:
    machine.run("ip", *arguments, network_only=True)  # process numbers are ours, not the machine's


def _exists(machine: Machine, link: str) -> bool:
    return machine.run("ip", "link", "show", link, network_only=True, check=False).returncode == 0

"""The network of a cluster: a bridge in the control plane's machine, a veth pair to each node, routes to the pods.

All of it is in the machines' network namespaces and ends with them. The outer machine has no part in it, so there is
no way out to the internet. Pods are routed, not bridged (CNI plugin ptp): a bridge would need br_netfilter for Services
between pods of one node.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from local_cluster.machine import Machine


@dataclass(frozen=True)
class Network:
    """The addresses of a cluster, all of one family."""

    hub: str
    """Address of the control plane's machine."""
    dns: str
    services: str
    all_pods: str
    everywhere: str
    node: str
    """Format of a node's address; takes the node's number, which has one digit."""
    pods: str
    """Format of the address range of a node's pods; takes the node's number."""
    prefix: int
    """Length of the network prefix of hub and nodes, in bits."""

    def build_hub(self, hub: Machine) -> None:
        """Make the bridge, unless it exists."""
        if not _exists(hub, "br0"):
            _ip(hub, "link", "add", "br0", "type", "bridge")
        self._set_address(hub, self.hub, "br0")

    def connect(self, hub: Machine, nodes: list[Machine]) -> None:
        """Make the missing veth pairs and routes between all nodes."""
        for number, node in enumerate(nodes, start=1):
            if not _exists(node, "eth0"):
                port = f"port{number}"
                if _exists(hub, port):  # its peer ended with an earlier node; the kernel has not removed it yet
                    _ip(hub, "link", "delete", port)
                _ip(hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
                _ip(hub, "link", "set", port, "master", "br0", "up")
            self._set_address(node, self.node.format(number), "eth0")
            _ip(node, "route", "replace", self.everywhere, "via", self.hub)
        for number in range(1, len(nodes) + 1):
            for other in (hub, *(node for each, node in enumerate(nodes, start=1) if each != number)):
                _ip(other, "route", "replace", self.pods.format(number), "via", self.node.format(number))

    def _set_address(self, machine: Machine, address: str, link: str) -> None:
        options = ["nodad"] if ":" in address else []  # usable at once: no other machine can have this address
        _ip(machine, "address", "replace", f"{address}/{self.prefix}", "dev", link, *options)
        _ip(machine, "link", "set", link, "up")


IPV4: Final = Network(
    hub="172.30.0.1",
    dns="10.96.0.10",
    services="10.96.0.0/24",
    all_pods="10.88.0.0/16",
    everywhere="0.0.0.0/0",
    node="172.30.0.1{}",
    pods="10.88.{}.0/24",
    prefix=24,
)
IPV6: Final = Network(
    hub="fd00:172:30::1",
    dns="fd00:10:96::a",
    services="fd00:10:96::/112",
    all_pods="fd00:10:88::/48",
    everywhere="::/0",
    node="fd00:172:30::1{}",
    pods="fd00:10:88:{}::/64",
    prefix=64,
)


def free_port() -> int:
    """Return a port of the outer machine's loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ip(machine: Machine, *arguments: str) -> None:
    machine.run("ip", *arguments, network_only=True)  # so that process numbers are the outer ones


def _exists(machine: Machine, link: str) -> bool:
    return machine.run("ip", "link", "show", link, network_only=True, check=False).returncode == 0

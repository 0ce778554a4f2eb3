"""Addresses to listen on, as settings of operator and agent name them: ``host:port`` or ``[host]:port``."""

from __future__ import annotations

from typing import Final

EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
"""Hosts that stand for all addresses of the machine, of both families: in a cluster of IPv6, probes, Prometheus and
the API server come to a pod's IPv6 address."""

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def parse_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port (0: any free one).

    Raises:
        ValueError: it is none; the message is the rule.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or int(port) > 65_535 or not host or (":" in host) != bracketed:
        raise ValueError(f"must be host:port, an IPv6 host in brackets, not {address!r}")
    return host.strip("[]"), int(port)


def on_loopback(address: str) -> bool:
    """Whether only this machine, or this pod, reaches an address; raises as ``parse_address`` does."""
    return parse_address(address)[0] in _LOOPBACK

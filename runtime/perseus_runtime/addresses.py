"""Addresses as settings and options name them: ``host:port`` or ``[host]:port`` to listen on, and URLs to ask."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
"""Hosts that stand for all addresses of the machine, of both families: in a cluster of IPv6, probes, Prometheus and
the API server come to a pod's IPv6 address."""

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts that only this machine, or this pod, reaches."""
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?(?P<path>/[\w./~%+-]*)?",
    re.ASCII | re.IGNORECASE,
)


class WebAddress(NamedTuple):
    """A URL of http or https that holds no secret."""

    scheme: str
    host: str
    """Without brackets."""
    port: int | None
    path: str
    """Without a slash at the end; empty: none."""


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
    return parse_address(address)[0] in LOOPBACK


def parse_url(url: str) -> WebAddress:
    """The parts of a URL of http or https.

    Raises:
        ValueError: it is none, or holds a user, password, query or fragment; the message is the rule, and never has the
            URL, which may hold a secret.
    """
    rule = "must be http:// or https:// and a host, with or without port and path; no user, password, query or fragment"
    parts = _URL.fullmatch(url)
    if parts is None:
        raise ValueError(rule)
    host, port = parts["host"].strip("[]"), parts["port"]
    if parts["host"].startswith("["):
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(rule) from None
    if port is not None and not 0 < int(port) <= 65_535:
        raise ValueError(f"{rule}; a port is from 1 to 65535")
    return WebAddress(parts["scheme"].lower(), host, int(port) if port else None, (parts["path"] or "").rstrip("/"))

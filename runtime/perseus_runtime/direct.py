"""Connections that no proxy of the environment sees: on this machine, and inside the cluster.

A company's ``HTTPS_PROXY`` knows neither. Go's programs, such as kubectl, never send loopback to it; Python's libraries
and gRPC do, unless ``no_proxy`` says otherwise, and pods have addresses that nobody lists there.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

GRPC: Final = ("grpc.enable_http_proxy", 0)
"""Option of a gRPC channel inside the cluster."""
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "[::1]")
_SERVICES: Final = (".svc", ".cluster.local")
_EVERYTHING: Final = "*"


def bypass_proxies(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process and its children reach loopback and, from a pod, the API server and services directly.

    Args:
        environment: its ``no_proxy`` and ``NO_PROXY`` become what the first of them says, and these hosts.
    """
    api_server = environment.get("KUBERNETES_SERVICE_HOST", "")
    hosts = [*_LOOPBACK, *((api_server, f"[{api_server}]", *_SERVICES) if api_server else ())]
    before = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    listed = [host for host in before.replace(" ", "").split(",") if host]
    if _EVERYTHING not in listed:
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*listed, *hosts]))

"""Mutual TLS for the two gRPC services, the agent's and the operator's: certificates are renewed without a restart.

Who may call is theirs. Training code, which shares this package, never imports this module: it has no grpc.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

import grpc

log = logging.getLogger(__name__)

CONNECTION_AGE: Final = ("grpc.max_connection_age_ms", 3_600_000)
"""Option of a server: old connections keep an old certificate; a caller that reconnects loses nothing."""


def server_credentials(*, key: str | Path, cert: str | Path, ca: str | Path) -> grpc.ServerCredentials:
    """Of PEM files, read again at the next handshake after one of them has changed; callers must show a certificate.

    Raises:
        OSError: a file cannot be read.
    """
    files = _Files((Path(key), Path(cert), Path(ca)))
    return grpc.dynamic_ssl_server_credentials(files.changed(), files.fetch, require_client_authentication=True)


class _Files:
    def __init__(self, paths: tuple[Path, Path, Path]) -> None:
        self._paths = paths
        self._seen: tuple[tuple[int, int, int], ...] = ()

    def changed(self) -> Any:
        """What the files say now, or None if they have not changed."""
        seen = tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in map(os.stat, self._paths))
        if seen == self._seen:
            return None
        key, chain, authority = (path.read_bytes() for path in self._paths)
        configuration = grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)
        self._seen = seen
        return configuration

    def fetch(self) -> Any:
        """Called by grpc at each new handshake, in a thread of its own."""
        try:
            return self.changed()
        except (OSError, ValueError) as error:
            log.error("certificates unreadable, keeping the ones in use: %s", error)
            return None

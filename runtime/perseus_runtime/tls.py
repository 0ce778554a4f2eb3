"""Mutual TLS for the two gRPC services, the agent's and the operator's: certificates are renewed without a restart.

Who may call is theirs. Training code, which shares this package, never imports this module: it has no grpc.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import grpc

from perseus_runtime.certificate import end_of

log = logging.getLogger(__name__)

CONNECTION_AGE: Final = ("grpc.max_connection_age_ms", 3_600_000)
"""Option of a server: old connections keep an old certificate; a caller that reconnects loses nothing."""


def server_credentials(*, key: str | Path, cert: str | Path, ca: str | Path) -> grpc.ServerCredentials:
    """Of PEM files, read again at the next handshake after one of them has changed; callers must show a certificate.

    Raises:
        OSError: a file cannot be read.
    """
    files = _Files(key=key, cert=cert, ca=ca)

    def configuration() -> Any:
        contents = files.changed()
        if contents is None:
            return None
        pair, authority = contents
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

    def fetch() -> Any:
        """Return the present credentials; gRPC calls this at each new handshake, in its own thread."""
        try:
            return configuration()
        except (OSError, ValueError) as error:
            log.error("certificates unreadable, keeping the ones in use: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)


class CallerCredentials:
    """Of PEM files, for channels: a channel keeps those that it was opened with, and must be replaced by a new one."""

    def __init__(self, *, key: str | Path, cert: str | Path, ca: str | Path) -> None:
        self._files = _Files(key=key, cert=cert, ca=ca)
        self._cert = cert
        self._ends: datetime | None = None

    def renewed(self) -> grpc.ChannelCredentials | None:
        """The credentials that the files hold now; None if they have not changed since the last call, or cannot be read
        now.
        """
        try:
            contents = self._files.changed()
        except OSError as error:
            log.error("certificates unreadable, keeping the ones in use: %s", error)
            return None
        if contents is None:
            return None
        (private_key, chain), authority = contents
        try:
            self._ends = end_of(chain)
        except ValueError:
            self._ends = None
        return grpc.ssl_channel_credentials(authority, private_key, chain)

    @property
    def expired(self) -> str:
        """That the certificate is over, for people; empty: it is not, as far as is known. The other side only hangs up,
        so the one that did not answer may be in order.
        """
        if self._ends is None or datetime.now(UTC) < self._ends:
            return ""
        return f"the own certificate {self._cert} expired at {self._ends:%Y-%m-%dT%H:%M:%SZ}; renew it"


class _Files:
    def __init__(self, *, key: str | Path, cert: str | Path, ca: str | Path) -> None:
        self._paths = Path(key), Path(cert), Path(ca)
        self._seen: tuple[tuple[int, int, int], ...] = ()

    def changed(self) -> tuple[tuple[bytes, bytes], bytes] | None:
        """Key and chain, and the authority, or None if the files have not changed.

        Raises:
            OSError: one cannot be read.
        """
        seen = tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in map(os.stat, self._paths))
        if seen == self._seen:
            return None
        private_key, chain, authority = (path.read_bytes() for path in self._paths)
        self._seen = seen
        return (private_key, chain), authority

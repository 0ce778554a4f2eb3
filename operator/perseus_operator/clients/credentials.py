"""Files for mutual TLS, and the name that the other side's certificate must carry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Credentials:
    """Paths of PEM files: own certificate chain and key, and the authority of the other side's certificate.

    Attributes:
        cert, key: shown to the other side.
        ca: signs its certificate.
        server_name: that a server's certificate must carry; a server itself needs none.
    """

    cert: str
    key: str
    ca: str
    server_name: str = ""

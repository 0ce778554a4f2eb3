"""When a certificate ends: the one field of X.509 that is read here, so that no library of cryptography is needed."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Final

_FIRST: Final = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_FORMATS: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}


def end_of(pem: bytes) -> datetime:
    """Until when the first certificate of a chain is valid.

    Args:
        pem: the chain.

    Raises:
        ValueError: it has no certificate, or one that cannot be read.
    """
    block = _FIRST.search(pem)
    if block is None:
        raise ValueError("there is no certificate in PEM")
    der = base64.b64decode(block[1])
    try:
        at = _element(der, _element(der, 0)[1])[1]  # into the certificate, and into what is signed of it
        if der[at] == _VERSION:
            at = _element(der, at)[2]
        for _ in ("serial number", "algorithm", "issuer"):
            at = _element(der, at)[2]
        after_begin = _element(der, _element(der, at)[1])[2]
        kind, start, stop = _element(der, after_begin)
        return datetime.strptime(der[start:stop].decode("ascii"), _FORMATS[kind]).replace(tzinfo=UTC)
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError("the certificate cannot be read") from error


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of an element, where its content begins, and where it ends."""
    tag, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        digits = size & 0x7F
        size, start = int.from_bytes(der[start : start + digits], "big"), start + digits
    return tag, start, start + size

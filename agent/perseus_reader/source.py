"""Fetches one metrics page again and again, on a connection that stays open, within bounds of bytes and time."""

from __future__ import annotations

import http.client
import time
from typing import Final

from perseus_reader.pages import MOST_BYTES, BadPage

WAIT_S: Final = 1.0
"""For one answer, from the request to its last byte. The slowest of a hundred of vLLM's takes 0.18 s."""
_CHUNK: Final = 65_536


class PageSource:
    """The page of one pod.

    Args:
        host: address of the pod.
        port: of its engine.
        path: of the page.
    """

    def __init__(self, host: str, port: int, path: str) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
        self._path = path
        self._where = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"

    def fetch(self) -> bytes:
        """Return the page as it is now.

        Raises:
            BadPage: there is none, or it is too large, or it takes too long; the next call connects anew.
        """
        until_s = time.monotonic() + WAIT_S
        try:
            self._connection.request("GET", self._path, headers={"Accept": "text/plain", "Accept-Encoding": "identity"})
            with self._connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise BadPage(f"{self._where} answers {answer.status}")
                return self._read(answer, until_s)
        except (http.client.HTTPException, OSError) as error:
            self._connection.close()
            raise BadPage(f"{self._where} cannot be read: {error or type(error).__name__}") from error
        except BadPage:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _read(self, answer: http.client.HTTPResponse, until_s: float) -> bytes:
        parts = list[bytes]()
        size = 0
        while part := answer.read1(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise BadPage(f"{self._where} has more than {MOST_BYTES:,} bytes")
            if time.monotonic() > until_s:
                raise BadPage(f"{self._where} takes longer than {WAIT_S:g} s")
        return b"".join(parts)

"""What the client says in a worker's log. Imported by workers, which run in the frameworks' environment."""

from __future__ import annotations

import logging


def listen() -> list[str]:
    """Warnings and worse of the client, from now on, also where a framework had them silenced."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    logging.getLogger("perseus_client").addHandler(handler)
    return lines

"""Logs as JSON, one object a line, so that a log collector needs no rules of ours.

Standard library only: agent and operator log alike, and the agent's image has nothing else that could do it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave to a log call as ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time (UTC, milliseconds), level, logger, message, further fields, exception.

    >>> record = logging.makeLogRecord({"name": "perseus_agent", "levelname": "INFO", "msg": "ready", "created": 0.25})
    >>> JsonFormatter().format(record)
    '{"time": "1970-01-01T00:00:00.250Z", "level": "INFO", "logger": "perseus_agent", "message": "ready"}'
    """

    def __init__(self, further: Callable[[logging.LogRecord], Mapping[str, Any]] = extra_fields) -> None:
        """Make a formatter.

        Args:
            further: fields of a record beside those that every record has. By default what was given as ``extra``;
                values that JSON does not know are written as text.
        """
        super().__init__()
        self._further = further

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        milliseconds = int(1000 * (record.created % 1))
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{milliseconds:03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._further(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(
    level: str, form: str = "json", further: Callable[[logging.LogRecord], Mapping[str, Any]] = extra_fields
) -> None:
    """Log from now on, in place of what was set up before.

    Args:
        level: the least that is logged, such as INFO.
        form: ``json``: one object a line; ``text``: for people.
        further: see ``JsonFormatter``.
    """
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter(further))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)

"""Log lines: one JSON object each, whatever the message and its fields hold."""

from __future__ import annotations

import json
import logging
import sys

from perseus_runtime.logs import JsonFormatter


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.INFO, "file", 1, message, arguments, None, extra=extra)


def test_a_line_is_one_object_with_what_was_given_as_extra() -> None:
    text = JsonFormatter().format(record("two\nlines of %s", "ü", gpu="GPU-0", reason=ValueError("v")))
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "x", "two\nlines of ü")
    assert (line["gpu"], line["reason"]) == ("GPU-0", "v")
    assert line["time"].endswith("Z")


def test_a_program_chooses_its_own_fields() -> None:
    formatter = JsonFormatter(lambda record: {"first": record.args[0]} if isinstance(record.args, tuple) else {})
    line = json.loads(formatter.format(record("%s", 7, gpu="GPU-0")))
    assert line["first"] == 7
    assert "gpu" not in line


def test_an_exception_is_a_field() -> None:
    failed = record("failed")
    try:
        raise ValueError("wrong")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert json.loads(JsonFormatter().format(failed))["exception"].endswith("ValueError: wrong")

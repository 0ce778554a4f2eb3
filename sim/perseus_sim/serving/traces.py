"""Traces of requests from files of others: what was asked of a service, when, and how much.

The form of a file is recognised by its first line. `FORMS_SUPPORTED` is the list for messages; docs/serving-traces.md
says what each form holds and lacks. The file is read line by line, each line and their number bounded; the first row
that cannot be used ends it with one message that names file, line, column and rule.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Final, Protocol

from perseus_sim.serving.requests import Request
from perseus_solver.errors import InvalidTrace, quoted

MAX_LINES: Final = 5_000_000
MAX_LINE_BYTES: Final = 1 << 20
"""A request log may hold prompts; a million bytes are the longest context that engines serve today."""
MAX_TOKENS: Final = 10_000_000
MAX_SPAN_S: Final = 366 * 86_400.0
"""A longer trace is a mistaken time in one row."""
FORMS_SUPPORTED: Final = (
    "CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure), arrival_s,prompt_tokens,output_tokens or "
    "Timestamp,Request tokens,Response tokens (BurstGPT), or JSON lines with timestamp,input_length,output_length "
    "(Mooncake) or of SGLang's --log-requests-format json or --export-metrics-to-file"
)

_Row = Mapping[str, object]

_VLLM_LOG: Final = re.compile(r"(\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d ")
_EPOCH_END_S: Final = 1e11
_HEALTH_CHECK: Final = "HEALTH_CHECK"
"""Begins the ids of SGLang's own requests."""


class _Readable(Protocol):
    def readline(self, size: int, /) -> bytes: ...


class _Refused(ValueError):
    """A column breaks a rule."""

    def __init__(self, column: str, rule: str) -> None:
        super().__init__(rule)
        self.column = column


@dataclass(frozen=True, slots=True)
class _Form:
    """Where a form has what a request needs; ``cached`` is optional."""

    arrival: str
    prompt: str
    output: str
    arrival_s: Callable[[_Row], float]
    cached: str = ""

    def request(self, row: _Row) -> Request:
        prompt_tokens = _tokens(row, self.prompt, 1, MAX_TOKENS)
        return Request(
            arrival_s=self.arrival_s(row),
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, _tokens(row, self.output, 0, MAX_TOKENS)),
            cached_tokens=_tokens(row, self.cached, 0, prompt_tokens) if self.cached in row else 0,
        )


def read_trace(path: Path) -> tuple[Request, ...]:
    """Read a trace; gzip is unpacked.

    Arrivals count from the first request's; rows out of order are sorted. A request without output tokens counts as one
    with one: its prompt was computed, and an engine that computes a prompt has a token. Times without a zone are UTC.

    Args:
        path: the file.

    Returns:
        The requests in the order of arrival, at least one.

    Raises:
        InvalidTrace: the file cannot be read or is of no known form, or a row cannot be used; one line that names the
            file, and the line, the column and the rule.
    """
    name = path.name
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            requests = _requests(name, _lines(name, gzip.GzipFile(fileobj=raw) if packed else raw))
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidTrace(f"trace {path} cannot be read: {error}") from None
    if not requests:
        raise InvalidTrace(f"trace {name} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    begin_s, end_s = requests[0].arrival_s, requests[-1].arrival_s
    if end_s - begin_s > MAX_SPAN_S:
        raise InvalidTrace(
            f"trace {name} lasts {(end_s - begin_s) / 86_400:,.0f} days: at most {MAX_SPAN_S / 86_400:g}"
        )
    return tuple(Request(r.arrival_s - begin_s, r.prompt_tokens, r.output_tokens, r.cached_tokens) for r in requests)


def _requests(name: str, lines: Iterator[tuple[int, str]]) -> list[Request]:
    """All requests of a trace, by the form that its first line shows."""
    number, first = next(lines, (1, ""))
    if not first:
        raise InvalidTrace(f"trace {name} is empty")
    if first.startswith(("{", "[")):
        form, rows = _json_form(name, number, first), _json_rows(name, chain([(number, first)], lines))
    else:
        header = [column.strip() for column in first.split(",")]
        form, rows = _csv_form(name, first, header), _csv_rows(name, header, lines)
    requests: list[Request] = []
    for at, row in rows:
        try:
            requests.append(form.request(row))
        except _Refused as error:
            raise InvalidTrace(f"trace {name}, line {at}, column {error.column}: {error}") from None
    if not requests and form is _SGLANG_LOG:
        raise InvalidTrace(
            f"trace {name} has no request.finished: SGLang writes them with --log-requests --log-requests-format json"
        )
    return requests


def _lines(name: str, file: _Readable) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, without their ends, and their numbers from 1."""
    for number in count(1):
        data = file.readline(MAX_LINE_BYTES + 1)
        if not data:
            return
        if len(data) > MAX_LINE_BYTES:
            raise InvalidTrace(f"trace {name}, line {number}: is longer than {MAX_LINE_BYTES:,} bytes")
        if number > MAX_LINES:
            raise InvalidTrace(f"trace {name} has more than {MAX_LINES:,} lines: cut out a shorter while")
        try:
            line = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InvalidTrace(f"trace {name}, line {number}: is not UTF-8 text: {error.reason}") from None
        if line:
            yield number, line


def _csv_form(name: str, first: str, header: list[str]) -> _Form:
    for form in _CSV_FORMS:
        if {form.arrival, form.prompt, form.output} <= set(header):
            return form
    if _VLLM_LOG.match(first):
        raise InvalidTrace(
            f"trace {name} is a log of vLLM, which holds neither the tokens of a request nor the year; "
            f"supported: {FORMS_SUPPORTED}"
        )
    raise InvalidTrace(
        f"trace {name} is of no known form; its first line is {quoted(first)}; supported: {FORMS_SUPPORTED}"
    )


def _csv_rows(name: str, header: list[str], lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, _Row]]:
    for number, line in lines:
        try:
            row = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise InvalidTrace(f"trace {name}, line {number}: {error}") from None
        if len(row) > len(header):
            raise InvalidTrace(f"trace {name}, line {number}: has {len(row)} columns, the first line {len(header)}")
        yield number, dict(zip(header, row, strict=False))


def _json_form(name: str, number: int, first: str) -> _Form:
    if first.startswith("["):
        return _SGLANG_LOG
    keys = _object(name, number, first).keys()
    for form, distinctive in (
        (_MOONCAKE, "input_length"),
        (_SGLANG_LOG, "event"),
        (_SGLANG_EXPORT, "request_parameters"),
    ):
        if distinctive in keys:
            return form
    raise InvalidTrace(
        f"trace {name} is of no known form; its first line has the keys {quoted(', '.join(keys))}; "
        f"supported: {FORMS_SUPPORTED}"
    )


def _json_rows(name: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, _Row]]:
    """The objects that are requests; of SGLang's log, only finished ones, and without what else the server logged."""
    for number, line in lines:
        logged = line.startswith("[")
        text = line.partition("] ")[2] if logged else line
        if logged and not text.startswith("{"):
            if text.startswith(("Receive: obj=", "Finish: obj=")):
                raise InvalidTrace(
                    f"trace {name}, line {number}: SGLang's text log has arrivals in whole seconds only: "
                    "log with --log-requests-format json"
                )
            continue
        row = _object(name, number, text)
        if "event" in row:
            if row["event"] != "request.finished":
                continue
            out = row.get("out")
            meta = out.get("meta_info") if isinstance(out, dict) else None
            if not isinstance(meta, dict):
                raise InvalidTrace(f"trace {name}, line {number}, column out.meta_info: is missing")
            row = {**meta, "timestamp": row.get("timestamp")}
        if not str(row.get("id", "")).startswith(_HEALTH_CHECK):
            yield number, row


def _object(name: str, number: int, text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidTrace(f"trace {name}, line {number}: is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidTrace(f"trace {name}, line {number}: must be a JSON object")
    return document


def _value(row: _Row, column: str) -> object:
    value = row.get(column)
    if value is None or value == "":
        raise _Refused(column, "is missing")
    return value


def _tokens(row: _Row, column: str, least: int, most: int) -> int:
    value = _value(row, column)
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKENS)) + 1 else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _Refused(column, f"must be a whole number from {least} to {most:,}, not {quoted(str(value)[:100])}")
    return value


def _seconds(column: str, unit_s: float = 1.0) -> Callable[[_Row], float]:
    """Reads a number of seconds, or of another unit."""

    def read(row: _Row) -> float:
        value = _value(row, column)
        try:
            number = math.nan if isinstance(value, bool) else float(value) * unit_s  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0.0 <= number < _EPOCH_END_S:
            raise _Refused(column, f"must be a time, a number from 0, not {quoted(str(value)[:100])}")
        return number

    return read


def _calendar(column: str) -> Callable[[_Row], float]:
    """Reads a date and time, UTC unless it has a zone, as seconds since 1970."""

    def read(row: _Row) -> float:
        value = _value(row, column)
        try:
            at = datetime.fromisoformat(str(value).strip())
            number = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            number = math.nan
        if not number >= 0.0:
            raise _Refused(
                column, f"must be a time since 1970, as 2023-11-16 18:15:46.68, not {quoted(str(value)[:100])}"
            )
        return number

    return read


_received_s = _seconds("request_received_ts")
_logged_s = _calendar("timestamp")
_latency_s = _seconds("e2e_latency")


def _sglang_arrival_s(row: _Row) -> float:
    """With ``--enable-metrics`` the log has the arrival itself; otherwise it is the line's time less the latency."""
    return _received_s(row) if "request_received_ts" in row else _logged_s(row) - _latency_s(row)


_SGLANG = "prompt_tokens", "completion_tokens"
_SGLANG_LOG: Final = _Form("timestamp", *_SGLANG, _sglang_arrival_s, cached="cached_tokens")
_SGLANG_EXPORT: Final = _Form("request_received_ts", *_SGLANG, _received_s, cached="cached_tokens")
_MOONCAKE: Final = _Form("timestamp", "input_length", "output_length", _seconds("timestamp", 1e-3))
_CSV_FORMS: Final = (
    _Form("TIMESTAMP", "ContextTokens", "GeneratedTokens", _calendar("TIMESTAMP")),
    _Form("arrival_s", "prompt_tokens", "output_tokens", _seconds("arrival_s"), cached="cached_tokens"),
    _Form("Timestamp", "Request tokens", "Response tokens", _seconds("Timestamp")),
)

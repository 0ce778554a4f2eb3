"""Traces of requests: what is read, and that every row that cannot be used is named with its line and column."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.offenders import ROOT

from perseus_sim.serving import traces
from perseus_sim.serving.requests import Request
from perseus_sim.serving.traces import read_trace
from perseus_solver.errors import InvalidTrace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OURS = "arrival_s,prompt_tokens,output_tokens,cached_tokens\n"
SHARED = ROOT.parent / "shared" / "data" / "serving"


def read(folder: Path, content: str | bytes) -> tuple[Request, ...]:
    path = folder / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(path)


def refused(folder: Path, content: str | bytes) -> str:
    with pytest.raises(InvalidTrace) as error:
        read(folder, content)
    message = str(error.value)
    assert "\n" not in message
    return message


def finished(at: str, prefix: str = "", **meta: object) -> str:
    known = {"id": "a", "prompt_tokens": 7, "completion_tokens": 5, "cached_tokens": 2, "e2e_latency": 1.5}
    out = {"meta_info": {**known, **meta}}
    return prefix + json.dumps({"timestamp": at, "event": "request.finished", "rid": "a", "obj": {}, "out": out}) + "\n"


@pytest.mark.parametrize(("part", "requests"), [("conv", 19_366), ("code", 8_819)])
def test_the_traces_of_azure_are_read_whole(part: str, requests: int) -> None:
    path = SHARED / f"AzureLLMInferenceTrace_{part}.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not here: it stays in its own folder")
    found = read_trace(path)
    assert len(found) == requests
    assert found[0].arrival_s == 0.0
    assert [r.arrival_s for r in found] == sorted(r.arrival_s for r in found)
    assert 3_400 < found[-1].arrival_s < 3_600


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.9799600"),
        ("2024-05-10 00:00:00+00:00", "2024-05-10 00:00:01.000000+00:00"),
        ("2024-05-10T02:00:00+02:00", "2024-05-10T00:00:01Z"),
    ],
)
def test_times_of_azure_of_all_years(tmp_path: Path, first: str, second: str) -> None:
    found = read(tmp_path, f"{AZURE}{first},4808,10\r\n{second},3180,8\r\n")
    assert [(r.prompt_tokens, r.output_tokens) for r in found] == [(4808, 10), (3180, 8)]
    assert found[1].arrival_s == pytest.approx(1.0, abs=1e-6)


def test_rows_out_of_order_are_sorted_and_count_from_the_first(tmp_path: Path) -> None:
    found = read(tmp_path, OURS + "12,3,4,1\n10.5,1,2,0\n")
    assert found == (Request(0.0, 1, 2), Request(1.5, 3, 4, 1))


def test_no_output_token_counts_as_one(tmp_path: Path) -> None:
    assert read(tmp_path, AZURE + "2024-05-10 00:00:00,5,0\n") == (Request(0.0, 5, 1),)


def test_further_columns_and_another_order_do_no_harm(tmp_path: Path) -> None:
    rows = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,12,6,18,API log\n"
    assert read(tmp_path, rows) == (Request(0.0, 12, 6),)


def test_gzip_and_a_byte_order_mark_are_understood(tmp_path: Path) -> None:
    content = ("\ufeff" + OURS + "\n0,3,4,\n".replace("4,", "4,0")).encode()
    assert read(tmp_path, gzip.compress(content)) == (Request(0.0, 3, 4),)


def test_mooncake_counts_milliseconds(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 9, "output_length": 2, "hash_ids": [1, 2]} for t in (0, 1500)]
    assert read(tmp_path, "\n".join(map(json.dumps, rows))) == (Request(0.0, 9, 2), Request(1.5, 9, 2))


@pytest.mark.parametrize("prefix", ["", "[2026-11-20 10:00:05] "])
def test_the_log_of_sglang_gives_finished_requests_when_they_came(tmp_path: Path, prefix: str) -> None:
    other = prefix + json.dumps({"timestamp": "2026-11-20T10:00:00", "event": "request.received", "rid": "a"}) + "\n"
    noise = "[2026-11-20 10:00:00] Decode batch, #running-req: 3\n" if prefix else ""
    own = finished("2026-11-20T10:00:01", prefix, id="HEALTH_CHECK_1")
    log = noise + other + own + finished("2026-11-20T10:00:05.500000", prefix) + finished("2026-11-20T10:00:06", prefix)
    assert read(tmp_path, log) == (Request(0.0, 7, 5, 2), Request(0.5, 7, 5, 2))


def test_the_log_of_sglang_has_the_arrival_itself_where_metrics_are_on(tmp_path: Path) -> None:
    log = finished("2026-11-20T10:00:05", request_received_ts=100.0)
    log += finished("2026-11-20T10:00:05", request_received_ts=103.25)
    assert [r.arrival_s for r in read(tmp_path, log)] == [0.0, 3.25]


def test_the_exported_metrics_of_sglang_are_read(tmp_path: Path) -> None:
    row = {
        "request_parameters": "{}",
        "id": "a",
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "request_received_ts": 1.0,
    }
    assert read(tmp_path, json.dumps(row)) == (Request(0.0, 7, 5),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (AZURE + "2024-05-10 00:00:00,5,6\nyesterday,5,6\n", "line 3, column TIMESTAMP: must be a time since 1970"),
        (AZURE + "1969-12-31 23:59:59,5,6\n", "line 2, column TIMESTAMP: must be a time since 1970"),
        (AZURE + ",5,6\n", "line 2, column TIMESTAMP: is missing"),
        (
            AZURE + "2024-05-10 00:00:00,0,6\n",
            "line 2, column ContextTokens: must be a whole number from 1 to 10,000,000",
        ),
        (AZURE + "2024-05-10 00:00:00,5.5,6\n", "column ContextTokens: must be a whole number"),
        (AZURE + "2024-05-10 00:00:00,-5,6\n", "column ContextTokens: must be a whole number"),
        (AZURE + "2024-05-10 00:00:00,٥,6\n", "column ContextTokens: must be a whole number"),
        (
            AZURE + "2024-05-10 00:00:00,5,10000001\n",
            "column GeneratedTokens: must be a whole number from 0 to 10,000,000",
        ),
        (AZURE + f"2024-05-10 00:00:00,5,{'9' * 5000}\n", "column GeneratedTokens: must be a whole number"),
        (AZURE + "2024-05-10 00:00:00,5\n", "line 2, column GeneratedTokens: is missing"),
        (AZURE + "2024-05-10 00:00:00,5,6,7\n", "line 2: has 4 columns, the first line 3"),
        (AZURE + '2024-05-10 00:00:00,"5,6\n', "line 2: unexpected end of data"),
        (OURS + "nan,5,6,0\n", "line 2, column arrival_s: must be a time, a number from 0"),
        (OURS + "inf,5,6,0\n", "line 2, column arrival_s: must be a time"),
        (OURS + "-1,5,6,0\n", "line 2, column arrival_s: must be a time"),
        (OURS + "1,5,6,9\n", "line 2, column cached_tokens: must be a whole number from 0 to 5, not '9'"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1, column output_length: is missing"),
        ('{"timestamp": true, "input_length": 5, "output_length": 6}\n', "line 1, column timestamp: must be a time"),
        (
            '{"timestamp": 0, "input_length": true, "output_length": 6}\n',
            "line 1, column input_length: must be a whole",
        ),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 6}\n', "line 1, column timestamp: must be a time"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 6}\n{"timestamp"', "line 2: is not JSON"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 6}\n3\n', "line 2: must be a JSON object"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 1: is not JSON"),
        ('{"prompt": "hello", "output_tokens": 5}\n', "first line has the keys 'prompt, output_tokens'"),
        (finished("2026-11-20T10:00:05", completion_tokens=None), "line 1, column completion_tokens: is missing"),
        (finished("2026-11-20T10:00:05", e2e_latency="?"), "line 1, column e2e_latency: must be a time"),
        (finished("soon"), "line 1, column timestamp: must be a time since 1970"),
        ('{"event": "request.finished", "out": []}\n', "line 1, column out.meta_info: is missing"),
        ('{"event": "request.received"}\n', "has no request.finished"),
        ("[2026-11-20 10:00:05] Finish: obj=GenerateReqInput(rid='a')\n", "log with --log-requests-format json"),
        ("(APIServer pid=1) INFO 11-20 10:00:05 [request_logger.py:66] Received request a: ...\n", "is a log of vLLM"),
        ("a,b,c\n1,2,3\n", "is of no known form; its first line is 'a,b,c'; supported: CSV with TIMESTAMP"),
        (AZURE, "has no requests"),
        ("", "is empty"),
        (b"\xff\xfe\x00", "line 1: is not UTF-8 text"),
        (b"\x1f\x8b\x08\x00", "cannot be read"),
        (OURS + "0,5,6,0\n99999999,5,6,0\n", "lasts 1,157 days: at most 366"),
        (OURS + "0" * ((1 << 20) + 1), "line 2: is longer than 1,048,576 bytes"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line_column_and_rule(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    said = refused(tmp_path, content)
    assert said.startswith("trace ")
    assert message in said
    assert len(said) < 600


def test_a_trace_may_have_so_many_lines_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINES", 3)
    assert len(read(tmp_path, OURS + "0,5,6,0\n1,5,6,0\n")) == 2
    assert "has more than 3 lines" in refused(tmp_path, OURS + "\n\n\n0,5,6,0\n")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match=r"gone\.csv cannot be read"):
        read_trace(tmp_path / "gone.csv")

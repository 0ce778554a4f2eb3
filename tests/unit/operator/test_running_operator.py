"""What keeps a running operator honest: probes that see a stuck loop, logs that machines read, calls that end, solves
that cannot take the node's memory."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
from tests.unit.operator.conftest import operator_of
from tests.waiting import eventually

from perseus_operator.__main__ import job_field
from perseus_operator.controller import operator as module
from perseus_operator.controller.settings import Settings
from perseus_operator.errors import SolveFailed
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.objects.values import JobRef
from perseus_operator.servers.handlers import _configure
from perseus_operator.servers.metrics_server import MetricsServer
from perseus_operator.solving import worker
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.request import SolveRequest
from perseus_runtime.logs import JsonFormatter
from perseus_sim.profiles import profile_csv

SETTINGS = Settings(insecure=True)
REQUEST = SolveRequest(profile_csv(2), "1f1b", stages=2, microbatches=3, chunks=None, blocking_power_mw=0, points=10)


def test_a_stuck_event_loop_fails_the_probe_and_a_loop_that_turns_again_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STUCK_S", 0.5)
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.01)
    release, done, made = threading.Event(), threading.Event(), threading.Event()
    held: dict[str, Any] = {}

    async def serve() -> None:
        operator = operator_of(None)
        beats = asyncio.create_task(operator._every(module._HEARTBEAT_S, operator._heartbeat))
        held.update(operator=operator, loop=asyncio.get_running_loop())
        made.set()
        while not done.is_set():
            await asyncio.sleep(0.01)
        beats.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert made.wait(60)
    server = MetricsServer("127.0.0.1:0", Metrics(), healthy=held["operator"].unhealthy, ready=lambda: True)

    def probe() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{server.address}/healthz") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    try:
        eventually(lambda: probe() == (200, "ok"))
        held["loop"].call_soon_threadsafe(release.wait)
        assert "the event loop has been silent" in eventually(lambda: (told := probe())[0] == 503 and told[1])
        release.set()
        eventually(lambda: probe() == (200, "ok"))
    finally:
        release.set()
        done.set()
        thread.join(60)
        server.close()


def test_every_log_line_is_one_json_object_that_names_its_job() -> None:
    formatter = JsonFormatter(job_field)
    job = JobRef("training", "gpt3", "uid")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    record = logging.LogRecord(
        "perseus_operator.controller.job_runner", logging.ERROR, "f", 1, "%s: a\nb %d", (job, 7), failure
    )
    text = formatter.format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["job"] == "training/gpt3"
    assert (line["level"], line["message"]) == ("ERROR", "training/gpt3: a\nb 7")
    assert "ValueError: two\nlines" in line["exception"]
    assert "job" not in json.loads(formatter.format(logging.LogRecord("x", logging.INFO, "f", 1, "hello", (), None)))


def test_no_request_and_no_watch_of_the_framework_waits_for_ever() -> None:
    settings = kopf.OperatorSettings()
    _configure(settings, SETTINGS)
    bounds = (
        settings.networking.request_timeout,
        settings.networking.connect_timeout,
        settings.watching.server_timeout,
        settings.watching.connect_timeout,
        settings.watching.inactivity_timeout,
        settings.process.ultimate_exiting_timeout,
    )
    assert all(bound is not None and 0 < bound <= 300 for bound in bounds)
    assert isinstance(settings.watching.server_timeout, int), "a real API server refuses 300.0"
    assert not settings.posting.enabled, "its events would repeat ours"


async def test_a_solve_beyond_its_memory_is_refused_by_the_setting_that_bounds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def greedy(request: SolveRequest) -> bytes:
        raise MemoryError

    monkeypatch.setattr(worker, "solve_in_process", greedy)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["solving", "700", "solve"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(asdict(REQUEST)).encode())))
    code = worker.main()
    assert code != 0

    program = tmp_path / "worker"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SolveFailed, match="needs more than the 700 MiB that --solve-memory-mib allows"):
        await SolverPool(workers=1, timeout_s=60, memory_mib=700).solve(REQUEST)

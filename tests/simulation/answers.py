"""What the solver answers, by the real functions: computed once for all seeds of a run.

Every seed measures latencies of its own, and solving for each to the microsecond was a fifth of what a seed costs. Here
the solver knows them roughly, so that requests repeat, and what one seed has asked, the others find in a folder.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any, Final

from tests.simulation.scheduler import Scheduler

from perseus_operator.solving import worker
from perseus_operator.solving.calibration import CheckRequest
from perseus_operator.solving.pool import digest_of
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_solver.errors import SolverError

_LEAST: Final = 1e-3
"""Of latencies in seconds, and of noise as a share."""
_folder: list[Path] = []
_VERIFIED: Final = {Task.RESTORE: Task.SOLVE, Task.CHECK: Task.CALIBRATE}
"""Whose answers are verified. What was answered is not computed again: rehearsals of so few points differ by more than
verification allows."""


def share(folder: Path) -> None:
    """From now on answers are in this folder, which several processes may use."""
    _folder[:] = [folder]


def answer(scheduler: Scheduler, task: Task, request: bytes) -> Verdict:
    """The answer to a request. To compute it changes nothing of what the seed draws."""
    if task in _VERIFIED:
        asked, claimed = _claim(task, request)
        if _stored(_VERIFIED[task], asked) == claimed:  # what an honest worker has answered is right
            return Verdict(Outcome.ANSWERED, claimed, seconds=0.5)
    rough = request if task is Task.CHECK else _roughly(request)  # that one has what was asked behind the answer
    path = _path(task, rough)
    if path.exists():
        verdict: Verdict = pickle.loads(path.read_bytes())  # this run has written it
        return verdict
    drawn = scheduler.random.getstate()
    try:
        verdict = Verdict(Outcome.ANSWERED, worker._answer(task.value, rough), seconds=0.5)
    except SolverError as error:
        verdict = Verdict(Outcome.REFUSED, message=str(error))
    except Exception as error:  # noqa: BLE001  # a process of a worker ends with it
        verdict = Verdict(Outcome.DIED, message=f"the solver process ended with exit code 1: {error}")
    scheduler.random.setstate(drawn)
    begun = path.with_suffix(f".{os.getpid()}")
    begun.write_bytes(pickle.dumps(verdict))
    begun.rename(path)
    return verdict


def _claim(task: Task, request: bytes) -> tuple[bytes, bytes]:
    """What was asked, and the answer that is to be verified."""
    if task is Task.CHECK:
        check = CheckRequest.from_bytes(request)
        return check.asked, check.answer
    asked, _, claimed = request.partition(b"\n")
    return asked, claimed


def _stored(task: Task, request: bytes) -> bytes | None:
    """What was answered to this before; None: nothing."""
    path = _path(task, _roughly(request))
    return pickle.loads(path.read_bytes()).answer if path.exists() else None


def _path(task: Task, rough: bytes) -> Path:
    return _folder[0] / digest_of(task, rough).hex()


def _roughly(request: bytes) -> bytes:
    """The request with latencies and noise to the nearest power of two, and with one distribution for all clocks."""
    line, newline, stored = request.partition(b"\n")
    inputs: dict[str, Any] = json.loads(line)
    if not inputs.get("hardware"):
        return request
    hardware = json.loads(inputs["hardware"])
    times = hardware["switch_latency_s"]
    hardware["switch_latency_s"] = {name: _power(times[name]) for name in ("p50", "p99")}
    for name in ("call_s", "noise"):
        hardware[name] = _power(hardware[name])
    return json.dumps({**inputs, "hardware": json.dumps(hardware)}).encode() + newline + stored


def _power(value: float) -> float:
    return float(_LEAST * 2 ** round(math.log2(max(value, _LEAST) / _LEAST)))

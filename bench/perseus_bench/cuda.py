"""A workload on a real GPU: PyTorch in a process of its own, which may be another Python's.

``cuda_items.py`` computes and times; here the process is started, commanded and ended.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeGuard

from perseus_bench.workload import WorkItem, WorkloadFailed

SCRIPT: Final = Path(__file__).with_name("cuda_items.py")
START_S: Final = 180.0
"""PyTorch from a cold disk takes a minute."""
ANSWER_S: Final = 60.0
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of three million items: of an hour, if they are as short as they may be."""
_LINE_BYTES: Final = 4_096
_NAME: Final = 200
_LONGEST_US: Final = 2.0**63


class CudaWorkload:
    """Matrix products on one GPU."""

    def __init__(self, gpu_uuid: str, python: str, script: Path = SCRIPT) -> None:
        """Start the process.

        Raises:
            WorkloadFailed: it does not start: no PyTorch, no CUDA, or the GPU is not visible.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="perseus-accept-")
        counter = Path(self._folder.name) / "completed"
        counter.write_bytes(bytes(8))
        with counter.open("r+b") as file:
            self._completed = mmap.mmap(file.fileno(), 8)
        self._errors = Path(self._folder.name) / "log"
        with self._errors.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [python, str(script), str(counter)],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu_uuid},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    start_new_session=True,  # an interruption from the keyboard is this process's to handle
                )
            except OSError as error:
                self._completed.close()
                self._folder.cleanup()
                raise WorkloadFailed(f"{python}: {error.strerror}") from error
        self._buffer = bytearray()
        try:
            self._name = _name(self._answer(START_S))
        except WorkloadFailed:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    def start(self, items: int | None = None) -> None:
        self._completed[:8] = bytes(8)
        self._send(f"start {'-' if items is None else items}")

    def completed(self) -> int:
        if self._process.poll() is not None:
            raise WorkloadFailed(f"the workload has ended: {self._last_error()}")
        count: int = struct.unpack("q", self._completed[:8])[0]
        return count

    def finish(self) -> Sequence[WorkItem]:
        self._send("finish")
        begin_us, durations_us = _times(self._answer(ANSWER_S))
        begins = accumulate(durations_us, initial=begin_us)
        return [WorkItem(begin, duration) for begin, duration in zip(begins, durations_us, strict=False)]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._completed.close()
        self._folder.cleanup()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except OSError:
            raise WorkloadFailed(f"the workload has ended: {self._last_error()}") from None

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        descriptor, until_s, seen = self._process.stdout.fileno(), time.monotonic() + timeout_s, 0
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            if seen > MAX_ANSWER_BYTES:
                raise WorkloadFailed(f"the workload's answer is longer than {MAX_ANSWER_BYTES} bytes")
            if not select.select([descriptor], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise WorkloadFailed(f"the workload does not answer within {timeout_s:g} s")
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise WorkloadFailed(f"the workload has ended: {self._last_error()}")
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkloadFailed(f"the workload's answer is no JSON: {str(error)[:100]}") from error

    def _last_error(self) -> str:
        with self._errors.open("rb") as file:
            file.seek(max(0, self._errors.stat().st_size - _LINE_BYTES))
            lines = file.read(_LINE_BYTES).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _name(answer: Any) -> str:
    name = answer.get("name") if isinstance(answer, dict) else None
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME or not name.isprintable():
        raise WorkloadFailed(f"the workload's answer: name must be a string of 1 to {_NAME} printable characters")
    return name


def _times(answer: Any) -> tuple[float, list[float]]:
    """Begin of the first item, and how long each took, µs."""
    begin_us, durations_us = (
        answer.get(key) if isinstance(answer, dict) else None for key in ("begin_us", "durations_us")
    )
    if not _possible(begin_us):
        raise WorkloadFailed("the workload's answer: begin_us must be a positive number of microseconds")
    if not isinstance(durations_us, list) or not all(map(_possible, durations_us)):
        raise WorkloadFailed("the workload's answer: durations_us must be a list of positive numbers of microseconds")
    return float(begin_us), [float(each) for each in durations_us]


def _possible(time_us: object) -> TypeGuard[float]:
    return isinstance(time_us, int | float) and not isinstance(time_us, bool) and 0 < time_us < _LONGEST_US

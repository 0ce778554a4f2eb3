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
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from perseus_agent.acceptance.workload import WorkItem, WorkloadFailed

SCRIPT: Final = Path(__file__).with_name("cuda_items.py")
START_S: Final = 180.0
"""PyTorch from a cold disk takes a minute."""
ANSWER_S: Final = 60.0


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
        self._buffer = b""
        try:
            self._name: str = self._answer(START_S)["name"]
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
        answer = self._answer(ANSWER_S)
        durations = answer["durations_us"]
        begins = accumulate(durations, initial=answer["begin_us"])
        return [WorkItem(begin, duration) for begin, duration in zip(begins, durations, strict=False)]

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
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], timeout_s)[0]:
                raise WorkloadFailed(f"the workload does not answer within {timeout_s:g} s")
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise WorkloadFailed(f"the workload has ended: {self._last_error()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_error(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

"""One piece of a solver's work in a process of its own, with a deadline and a bound on its memory, and how it ended.

The same in the operator's pod and in a pod of the solver service. How it ended is a value: it travels over gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from enum import Enum
from typing import Final

from perseus_operator.errors import InvalidProfile, SolveFailed, SolveTimeout
from perseus_operator.solving import worker

LONGEST_MESSAGE: Final = 500
"""Characters of a refusal, which becomes the message of a condition."""
_PIECE_BYTES: Final = 1 << 18
"""Read or written in one turn of the event loop."""


class Task(Enum):
    """What a worker can do. The values are arguments of the worker process."""

    SOLVE = "solve"
    CALIBRATE = "calibrate"
    RESTORE = "restore"
    """Verify a frontier that is stored, or that a worker of the solver service claims."""
    CHECK = "check"
    """Verify a calibration that such a worker claims."""
    PLAN_SERVING = "plan-serving"
    """Whether a pool that serves would save by a split into pools by length."""


class Outcome(Enum):
    """How it ended."""

    ANSWERED = "answered"
    INVALID_PROFILE = "invalid profile"
    REFUSED = "refused"
    OUT_OF_TIME = "out of time"
    OUT_OF_MEMORY = "out of memory"
    DIED = "died"


@dataclass(frozen=True)
class Verdict:
    """An answer, or why there is none.

    Attributes:
        outcome: how it ended.
        answer: bytes of the worker process; empty unless it answered.
        message: one line for users; empty if it answered.
        seconds: that it took.
    """

    outcome: Outcome
    answer: bytes = b""
    message: str = ""
    seconds: float = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether the inputs took more time or memory than is allowed, and would again."""
        return self.outcome in {Outcome.OUT_OF_TIME, Outcome.OUT_OF_MEMORY}

    def result(self) -> bytes:
        """The answer.

        Raises:
            InvalidProfile: the CSV breaks a rule.
            SolveTimeout: it took longer than allowed.
            SolveFailed: there is no answer for another reason.
        """
        if self.outcome is Outcome.ANSWERED:
            return self.answer
        if self.outcome is Outcome.INVALID_PROFILE:
            raise InvalidProfile("ProfileInvalid", self.message)
        raise (SolveTimeout if self.outcome is Outcome.OUT_OF_TIME else SolveFailed)(self.message)


_REFUSALS: Final = {worker.INVALID_PROFILE: Outcome.INVALID_PROFILE, worker.REFUSED: Outcome.REFUSED}


async def run_worker(task: Task, request: bytes, *, timeout_s: float, memory_mib: int, most_bytes: int) -> Verdict:
    """Run one worker process to its end. If the caller is cancelled, it is killed.

    Args:
        task: what to do.
        request: as the worker reads it.
        timeout_s: after which it is killed.
        memory_mib: address space that it may take.
        most_bytes: of an answer; a worker that writes more is killed.
    """
    started_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        worker.__name__,
        str(memory_mib),
        task.value,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, answer, errors = await asyncio.gather(
                _write(process, request), _read(process, process.stdout, most_bytes), _last(process.stderr)
            )
            await process.wait()
    except TimeoutError:
        return Verdict(Outcome.OUT_OF_TIME, message=f"the solver was stopped after {timeout_s:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if answer is None:
        return Verdict(Outcome.DIED, message=f"the solver process answered more than {most_bytes} bytes")
    last_line = errors.decode(errors="replace").strip().rpartition("\n")[2][:LONGEST_MESSAGE]
    code = process.returncode
    if code == 0:
        return Verdict(Outcome.ANSWERED, answer, seconds=time.monotonic() - started_s)
    if code in _REFUSALS:
        return Verdict(_REFUSALS[code], message=last_line)
    if code in (worker.OUT_OF_MEMORY, -signal.SIGKILL):
        allowed = f"the {memory_mib} MiB that --solve-memory-mib allows"
        message = f"the solver needs more than {allowed}, or than its container has"
        return Verdict(Outcome.OUT_OF_MEMORY, message=message)
    return Verdict(Outcome.DIED, message=f"the solver process ended with exit code {code}: {last_line}")


async def _write(process: asyncio.subprocess.Process, request: bytes) -> None:
    """Write a request piece by piece: as a whole it would be copied on the event loop."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and says why
        for begin in range(0, len(request), _PIECE_BYTES):
            process.stdin.write(request[begin : begin + _PIECE_BYTES])
            await process.stdin.drain()
    process.stdin.close()


async def _read(
    process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, most_bytes: int
) -> bytes | None:
    """Read an answer; None: it is longer, and the process is killed."""
    assert stream is not None
    pieces, size = list[bytes](), 0
    while piece := await stream.read(_PIECE_BYTES):
        size += len(piece)
        if size > most_bytes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return None
        pieces.append(piece)
    return b"".join(pieces)


async def _last(stream: asyncio.StreamReader | None) -> bytes:
    """Read all of a stream, and keep its end."""
    assert stream is not None
    last = b""
    while piece := await stream.read(_PIECE_BYTES):
        last = (last + piece)[-8 * LONGEST_MESSAGE :]
    return last

"""How a process that times GPUs is scheduled, and how it stops: the agent, its keeper, the acceptance run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path


def use_batch_scheduling() -> None:
    """Schedule this process as a batch job, so that it never preempts a training thread that wakes it.

    Threads started later inherit this. On a node whose CPUs are all busy, Linux otherwise runs a woken process in place
    of the one that woke it: a mark of the client then took milliseconds in one call of a hundred; with this, some tens
    of microseconds (measured).
    """
    with contextlib.suppress(OSError, AttributeError):  # a strict seccomp profile, or not Linux: it is optional
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def shorten_timer_slack() -> None:
    """Let timers of this thread, and of threads started later, be late by at most one microsecond instead of fifty."""
    with contextlib.suppress(OSError):  # a strict profile, or not Linux: the agent then reads ranks a little later
        Path("/proc/self/timerslack_ns").write_text("1000")


def stop_on_signals(stop: threading.Event) -> None:
    """Set the event on SIGTERM or SIGINT, from a thread that does nothing else.

    A signal handler would run in the main thread, perhaps while that holds the event's own lock; a second signal at
    that moment would hang the agent with clocks locked. Threads started later inherit the signal mask.
    """
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def wait() -> None:
        while True:
            signal.sigwait(numbers)
            stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()

"""``perseus-agent``: settings, logs, signals, and the exit code. Everything else is ``server``'s.

Exit codes: 0 stopped as told and every clock given back; 1 stopped, but some GPU could not be given back (the journal
remembers); 2 a setting or the surroundings are wrong; 3 the driver was replaced under the agent, start it anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from perseus_agent.errors import AgentError, DriverMismatch, SettingsError
from perseus_agent.settings import parse_settings

SWITCH_INTERVAL_S: Final = 0.000_3
"""How long the thread of a GPU that was woken waits for one that reports an iteration or answers a command, at most."""

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what is given as ``extra`` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update({name: value for name, value in vars(record).items() if name not in _PLAIN})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def use_batch_scheduling() -> None:
    """Never take a CPU from a training thread at the moment it wakes us; threads made later inherit this.

    On a node whose CPUs are all busy a woken process otherwise runs in place of the one that woke it: measured, a mark
    of the client then took milliseconds in one call of a hundred, and some tens of microseconds with this.
    """
    with contextlib.suppress(OSError, AttributeError):  # a strict seccomp profile, or not Linux: nice to have
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def shorten_timer_slack() -> None:
    """Let timers of this thread, and of threads made later, be late by a microsecond instead of fifty."""
    with contextlib.suppress(OSError):  # a strict profile, or not Linux: looks at ranks are a little later then
        Path("/proc/self/timerslack_ns").write_text("1000")


def stop_on_signals(stop: threading.Event) -> None:
    """Set the event on SIGTERM or SIGINT, from a thread that does nothing else.

    Not from a handler: that runs in the main thread, perhaps while it holds the event's own lock to wait for it, and a
    second signal at that moment would hang the agent with clocks locked. Threads made later inherit the mask.
    """
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def wait() -> None:
        while True:
            signal.sigwait(numbers)
            stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT."""
    try:
        settings = parse_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    except SettingsError as error:
        print(f"perseus-agent: {error}", file=sys.stderr)  # noqa: T201  # before logging is set up
        return 2
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    stop = threading.Event()
    stop_on_signals(stop)
    log = logging.getLogger("perseus_agent")
    use_batch_scheduling()
    shorten_timer_slack()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        from perseus_agent.lifecycle import run

        return run(settings, stop)
    except DriverMismatch as error:
        log.error("driver replaced: %s", error)
        return 3
    except AgentError as error:
        log.error("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())

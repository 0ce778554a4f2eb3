"""``perseus-agent``: reads settings, sets up logs and signals, and runs the agent.

``perseus-agent keep``, with the same settings, is the agent's clock keeper (``perseus_agent.keeper``). Start it beside
the agent, before or after it. It ends on SIGTERM, once no agent is there that it watches.

Exit codes of the agent: 0: stopped on request, all GPUs are back at their default clocks. 1: stopped, but some GPU
could not be reset; the journal lists it for the next start. 2: a setting or the environment is wrong. 3: the driver
was replaced while the agent ran; start the agent again. 4: the thread of a GPU computed without an end, which is a
defect of the agent; its keeper gives that GPU back; start the agent again. The keeper has 0 and 2.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Final

from perseus_agent.errors import AgentError, DriverMismatch, SettingsError
from perseus_agent.process import shorten_timer_slack, stop_on_signals, use_batch_scheduling
from perseus_agent.settings import Settings, parse_settings
from perseus_runtime.logs import log_to_stderr

SWITCH_INTERVAL_S: Final = 0.000_3
"""Longest time that the woken thread of a GPU waits for a thread that reports an iteration or answers a command."""


def main(arguments: list[str] | None = None) -> int:
    """Run the agent, or with ``keep`` its clock keeper, until SIGTERM or SIGINT."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["accept"]:
        print("perseus-agent: accept is a program of its own now: run perseus-bench", file=sys.stderr)  # noqa: T201
        return 2
    run = _serve
    if arguments[:1] == ["keep"]:
        run, arguments = _keep, arguments[1:]
    try:
        settings = parse_settings(arguments, os.environ)
    except SettingsError as error:
        print(f"perseus-agent: {error}", file=sys.stderr)  # noqa: T201  # before logging is set up
        return 2
    log_to_stderr(settings.log_level)
    log = logging.getLogger("perseus_agent")
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        return run(settings, stop)
    except DriverMismatch as error:
        log.error("driver replaced: %s", error)
        return 3
    except AgentError as error:
        log.error("%s", error)
        return 2


def _keep(settings: Settings, stop: threading.Event) -> int:
    from perseus_agent.keeper.keeper import keep

    keep(settings, stop)
    if not stop.is_set():
        # As a new program: the next agent may have come with another driver, and a process cannot change its library.
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # the arguments of this process
    return 0


def _serve(settings: Settings, stop: threading.Event) -> int:
    use_batch_scheduling()
    shorten_timer_slack()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    from perseus_agent.lifecycle import run

    return run(settings, stop)


if __name__ == "__main__":
    sys.exit(main())

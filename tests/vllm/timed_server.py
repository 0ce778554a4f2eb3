"""vLLM's server, whose plugin works in one of each two blocks of steps alone; a random number says in which.

Of each step the file ``PLUGIN_TIMES`` gets when the plugin was called (the machine's clock), and the processor's time
that it took, both in ns; 0 where it did not work. Run by path where vLLM and the client are installed:
``python timed_server.py <flags of the server>``.
"""

from __future__ import annotations

import os
import random
import runpy
import struct
import time
from typing import Any

from perseus_client.vllm import PerseusStatLogger

BLOCK = 4
"""Steps. What disturbs one disturbs the next ones, too: pairs of longer blocks differ more, and there are fewer."""


def _timed() -> None:
    record, times = PerseusStatLogger.record, open(os.environ["PLUGIN_TIMES"], "ab", buffering=0)  # noqa: SIM115
    step, first = 0, False

    def timed(self: PerseusStatLogger, *arguments: Any, **named: Any) -> None:
        nonlocal step, first
        called_ns, took_ns = time.monotonic_ns(), 0
        if step % (2 * BLOCK) == 0:
            first = random.random() < 0.5
        if (step % (2 * BLOCK) < BLOCK) == first:
            begun_ns = time.thread_time_ns()
            record(self, *arguments, **named)
            took_ns = time.thread_time_ns() - begun_ns
        step += 1
        times.write(struct.pack("<QQ", called_ns, took_ns))

    PerseusStatLogger.record = timed  # type: ignore[method-assign]


if __name__ == "__main__":  # vLLM imports this file once more in the engine's process
    _timed()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

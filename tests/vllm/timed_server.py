"""vLLM's server, which appends the processor's time of each step of the plugin to the file ``PLUGIN_TIMES``, in ns.

Run by path where vLLM and the client are installed: ``python timed_server.py <flags of the server>``.
"""

from __future__ import annotations

import os
import runpy
import struct
import time
from typing import Any

from perseus_client.vllm import PerseusStatLogger


def _timed() -> None:
    record, times = PerseusStatLogger.record, open(os.environ["PLUGIN_TIMES"], "ab", buffering=0)  # noqa: SIM115

    def timed(self: PerseusStatLogger, *arguments: Any, **named: Any) -> None:
        begun_ns = time.thread_time_ns()
        record(self, *arguments, **named)
        times.write(struct.pack("<Q", time.thread_time_ns() - begun_ns))

    PerseusStatLogger.record = timed  # type: ignore[method-assign]


if __name__ == "__main__":  # vLLM imports this file once more in the engine's process
    _timed()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

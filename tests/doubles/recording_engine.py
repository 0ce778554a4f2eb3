"""A serving engine for tests of the agent: the real session, steps that sleep, and the load that the test says.

``python -m tests.doubles.recording_engine '<json>'`` runs it. Each line on its standard input is the load from then on,
in JSON: the arguments of ``EngineSession.step``; ``{"silent": true}`` ends its steps, ``{"lie": {…}}`` has `tell` write
what is not true after each. With ``bursts`` and ``times`` in the first line, in every so many steps prompts begin to
wait, and a file gets the moment of each, in nanoseconds. With ``requests``, a file gets of each request, which is of
`REQUEST` steps, the nanoseconds that it took and those that the session took: all of a call that waits, and of others
what they compute, since meanwhile another process may have the core.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import threading
import time
import zlib
from typing import Any

from perseus_client.engine import EngineSession
from perseus_proto.engine_channel import PLACES, EngineCounts, EngineWriter
from perseus_proto.engine_hello import EngineHello

BURST = 5
"""Steps for which prompts wait."""
RECORD = 64
"""Where it begins in the memory."""
REQUEST = 25
"""Tokens of an answer."""
IDLE: dict[str, Any] = {"kv_share": 0.0, "waiting": 0, "prefilling": 0, "running": 0}


def tell(writer: EngineWriter, counts: dict[str, int | str], missed: int = 0, rings: int = 0) -> None:
    """Write a whole record that is not true.

    Args:
        writer: of the memory.
        counts: by name; "falls": less each time.
        missed: requests whose times are beyond every edge.
        rings: of the bell.
    """
    told = EngineCounts(*writer._sums)
    falling = (1 << 40) - told.sequence
    words = told._asdict() | {name: falling if value == "falls" else int(value) for name, value in counts.items()}
    packed = struct.pack("<16Q", *(word & (1 << 64) - 1 for word in words.values()))
    writer.count_times([PLACES - 1] * missed, [PLACES - 1] * missed)
    writer._map[RECORD : RECORD + len(packed) + 4] = packed + struct.pack("<I", zlib.crc32(packed))
    for _ in range(rings):
        os.eventfd_write(writer._event_fd, 1)


def waits() -> int:
    """How often this thread has waited for something other than a core."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def main() -> None:
    """Step until the input ends."""
    arguments, load = json.loads(sys.stdin.readline()), dict(IDLE)
    session = EngineSession(arguments["socket"], EngineHello("recording", "1.0", "llama", "tp 1", (("dtype", "half"),)))
    lock = threading.Lock()

    def obey() -> None:
        for line in sys.stdin:
            with lock:
                load.clear()
                load.update({**IDLE, **json.loads(line)})

    reader = threading.Thread(target=obey, daemon=True)
    reader.start()
    session.wait_connected(180)
    bursts, step = arguments.get("bursts", 0), 0
    begun_ns, ours_ns = time.monotonic_ns(), 0
    while reader.is_alive():
        time.sleep(arguments["step_s"])
        with lock:
            now = dict(load)
        if now.pop("silent", False):
            continue
        lie = now.pop("lie", None)
        step += 1
        if bursts and step % bursts < BURST:
            now["waiting"] = 1
            if step % bursts == 0:
                with open(arguments["times"], "a", encoding="utf-8") as times:
                    times.write(f"{time.monotonic_ns()}\n")
        waited, asked_ns, computed_ns = waits(), time.monotonic_ns(), time.thread_time_ns()
        session.step(now.pop("kv_share"), step_s=arguments["step_s"], generated_tokens=now["running"], **now)
        lasted_ns, computed_ns = time.monotonic_ns() - asked_ns, time.thread_time_ns() - computed_ns
        ours_ns += computed_ns if waits() == waited else lasted_ns
        if lie is not None and (writer := session._connector.writer) is not None:
            tell(writer, **lie)
        if "requests" in arguments and step % REQUEST == 0:
            with open(arguments["requests"], "a", encoding="utf-8") as requests:
                requests.write(f"{time.monotonic_ns() - begun_ns} {ours_ns}\n")
            begun_ns, ours_ns = time.monotonic_ns(), 0


if __name__ == "__main__":
    main()

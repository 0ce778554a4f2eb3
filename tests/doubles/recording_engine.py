"""A serving engine for tests of the agent: the real session, steps that sleep, and the load that the test says.

``python -m tests.doubles.recording_engine '<json>'`` runs it. Each line on its standard input is the load from then on,
in JSON: the arguments of ``EngineSession.step``; ``{"silent": true}`` ends its steps, ``{"lie": n}`` makes the n-th
count of its memory go backwards. With ``bursts`` and ``times`` in the first line, in every so many steps prompts begin
to wait, and a file gets the moment of each, in nanoseconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from perseus_client.engine import EngineSession
from perseus_proto.engine_hello import EngineHello

BURST = 5
"""Steps for which prompts wait."""
IDLE: dict[str, Any] = {"kv_share": 0.0, "waiting": 0, "prefilling": 0, "running": 0}


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
    while reader.is_alive():
        time.sleep(arguments["step_s"])
        with lock:
            now = dict(load)
        if now.pop("silent", False):
            continue
        lie = now.pop("lie", 0)
        writer = session._connector.writer
        if lie and writer is not None:
            writer._sums[lie] = 0
        step += 1
        if bursts and step % bursts < BURST:
            now["waiting"] = 1
            if step % bursts == 0:
                with open(arguments["times"], "a", encoding="utf-8") as times:
                    times.write(f"{time.monotonic_ns()}\n")
        session.step(now.pop("kv_share"), step_s=arguments["step_s"], generated_tokens=now["running"], **now)


if __name__ == "__main__":
    main()

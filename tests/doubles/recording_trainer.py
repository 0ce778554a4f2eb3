"""A training process for tests of the agent: the real client, instructions that sleep, and a quick start.

``python -m tests.doubles.recording_trainer '<json>'`` runs it.
"""

from __future__ import annotations

import json
import sys
import time

import perseus_client

CHECK_S = 0.5
"""Of a test of the GPU between two iterations."""


def schedule_of(instructions: int) -> list[tuple[str, int, int]]:
    """Forward and backward in turn."""
    return [(("forward", "backward")[position % 2], position // 2, 0) for position in range(instructions)]


def main() -> None:
    """Train the given number of iterations."""
    sys.stdin.readline()  # until the test has placed this process in a pod
    arguments = json.loads(sys.argv[1])
    schedule = schedule_of(arguments["instructions"])
    session = perseus_client.connect(
        arguments["dp"],
        arguments["stage"],
        schedule=schedule,
        socket_path=arguments["socket"],
        gpu_uuid=arguments["gpu"] or None,
        timing="synchronised",  # an instruction is over when its call returns
    )
    session.wait_connected(180)
    for iteration in range(arguments["iterations"]):
        if arguments["check_every"] and iteration % arguments["check_every"] == arguments["check_every"] - 1:
            with session.default_clocks():
                time.sleep(CHECK_S)
        with session.step():
            for kind, microbatch, chunk in schedule:
                with session.instruction(kind, microbatch, chunk):
                    if arguments["instruction_s"]:
                        time.sleep(arguments["instruction_s"])


if __name__ == "__main__":
    main()

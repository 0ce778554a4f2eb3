"""A simulated vLLM in a pod of a cluster with simulated GPUs: ``python -m perseus_sim.serving.pod_engine``.

It serves requests of its own making, or those that a router sends to its port, on the GPUs that the kubelet gave it,
shows its page on that port, and prints every few seconds, one JSON object a line, how many requests have ended, how
many of them kept the limits, and what its GPUs have drawn, measured on the GPUs and not by the agent. SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import zlib
from typing import Final

from perseus_sim.gpus.shim_gpu import NoGpus, ShimGpu, granted
from perseus_sim.serving.engine_process import CONSUMER, PRODUCER, EngineProcess, Results, open_session, serve
from perseus_sim.serving.load import Chat
from perseus_sim.serving.machine import GPUS, MODELS, Machine

_PRINT_S: Final = 2.0
_SPAN_S: Final = 6 * 3600.0
"""Requests are made for so long; a pod that lives longer is idle then."""


def main() -> int:
    """Entry point: 0: stopped on request; 2: there are no simulated GPUs."""
    parser = argparse.ArgumentParser(prog="perseus_sim.serving.pod_engine", description="A simulated vLLM in a pod.")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="the kind of its GPUs")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="what it serves")
    parser.add_argument("--per-second", type=float, default=2.0, help="own requests a second; 0: a router's only")
    parser.add_argument("--prompt-tokens", type=int, default=300, help="median of a prompt")
    parser.add_argument("--output-tokens", type=int, default=150, help="median of an answer")
    parser.add_argument("--first-token-s", type=float, default=0.25, help="limit of the time to the first token")
    parser.add_argument("--per-token-s", type=float, default=0.05, help="limit of the mean time between tokens")
    parser.add_argument("--port", type=int, default=8000, help="of the metrics page; 0: none")
    parser.add_argument(
        "--kv-role", choices=("", PRODUCER, CONSUMER), default="", help="prompts alone, or tokens alone"
    )
    parser.add_argument("--no-plugin", action="store_true", help="tell the agent nothing")
    given = parser.parse_args()
    try:
        folder, uuids = granted(os.environ)
        gpus = [ShimGpu(folder, uuid) for uuid in uuids]
    except NoGpus as error:
        print(f"perseus_sim.serving.pod_engine: {error}", file=sys.stderr)
        return 2
    printed_s = 0.0

    def show(results: Results) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s < _PRINT_S:
            return
        printed_s = time.monotonic()
        kept = sum(
            (given.kv_role == CONSUMER or first <= given.first_token_s) and each <= given.per_token_s
            for _, first, each, _ in results.requests
        )
        totals = {"ended": len(results.requests), "kept": kept, "joules": round(results.joules, 1)}
        print(json.dumps({**totals, "tokens": sum(one[3] for one in results.requests)}), flush=True)

    chat = Chat(given.per_second, given.prompt_tokens, given.output_tokens)
    requests = chat.requests(_SPAN_S, zlib.crc32(socket.gethostname().encode())) if given.per_second else ()
    session = None if given.no_plugin else open_session(given.model, len(gpus), given.kv_role)
    machine = Machine(given.gpu, given.model, len(gpus))
    process = EngineProcess(machine, requests, gpus, session, show, kv_role=given.kv_role)
    try:
        serve(process, session, f"0.0.0.0:{given.port}" if given.port else "")
    finally:
        for gpu in gpus:
            gpu.rest()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A serving engine as a process on simulated GPUs: ``python -m perseus_sim.serving.engine_process SPEC.json``.

It serves a trace in real time, at the clocks that are in effect on its GPUs, shows the metrics page of vLLM, and tells
its node's agent after each step what it does, as vLLM does through the plugin: by the production client, if
PERSEUS_SOCKET names a socket. What became of the requests it writes to a file that tests and demo read, so that no
figure comes from the agent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from perseus_client.engine import EngineSession
from perseus_core import keys
from perseus_core.units import us_from_ns
from perseus_proto.engine_hello import EngineHello
from perseus_sim.gpus.clock_in_effect import Gpu
from perseus_sim.gpus.shared_gpu import SharedGpu
from perseus_sim.serving.engine import Served
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.gpu_group import GpuGroup
from perseus_sim.serving.live import EngineStep, LiveEngine
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.metrics_server import Manner, MetricsServer
from perseus_sim.serving.traces import read_trace

_TICK_S: Final = 0.002
"""A change of the clocks is late by no more."""
_WRITE_S: Final = 0.5


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    Attributes:
        gpus: files of the simulated GPUs that it has.
        gpu: the kind of GPU, one of ``machine.GPUS``.
        model: one of ``machine.MODELS``.
        trace: of its requests.
        results: file to which what became of them is written, one JSON object.
        metrics_address: host:port of its metrics page; empty: it has none.
    """

    gpus: tuple[str, ...]
    gpu: str
    model: str
    trace: str
    results: str
    metrics_address: str = ""

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


class EngineProcess:
    """One engine with its GPUs.

    Args:
        spec: what it is.
        gpus: its GPUs.
        session: to the agent; None: none is told.
    """

    def __init__(self, spec: EngineSpec, gpus: Sequence[Gpu], session: EngineSession | None) -> None:
        self.machine = Machine(spec.gpu, spec.model, len(gpus))
        self.metrics = EngineMetrics()
        self._session = session
        self._results = Path(spec.results)
        self._begun_s = time.time()
        self._ended: list[tuple[float, float, float, int]] = []
        """Of each request: when it came, the time to its first token and between tokens, and its tokens."""
        self._group = GpuGroup(gpus, us_from_ns(time.monotonic_ns()))
        self._live = LiveEngine(self.machine, read_trace(Path(spec.trace)), self.metrics, ended=self._step)

    def run(self, stop: threading.Event) -> None:
        """Serve until told to stop."""
        write_s = 0.0
        while not stop.wait(_TICK_S):
            now_us = us_from_ns(time.monotonic_ns())
            self._live.set_clocks(*self._group.clocks_mhz(now_us))
            self._group.drew(self._live.joules, now_us)
            if time.monotonic() >= write_s:
                write_s = time.monotonic() + _WRITE_S
                self._write()
        self._write()

    def _step(self, step: EngineStep) -> None:
        for one in step.finished:
            self._ended.append((one.request.arrival_s, _first_token_s(one), one.per_token_s, one.request.output_tokens))
        if self._session is None:
            return
        load = step.load
        self._session.step(
            min(1.0, load.kv_tokens / self.machine.kv_capacity),
            waiting=load.waiting,
            prefilling=load.prefilling,
            running=load.running,
            step_s=step.seconds,
            computes_prompt=step.prompt_tokens > 0,
            prompt_tokens=step.prompt_tokens,
            generated_tokens=step.decoding + len(step.started),
            preempted=step.preempted,
            first_tokens_s=[_first_token_s(one) for one in step.started],
            tokens_s=[one.per_token_s for one in step.finished],
            requests=len(step.finished),
        )

    def _write(self) -> None:
        found = {"begun_s": self._begun_s, "joules": self._live.joules, "requests": self._ended}
        partial = self._results.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(self._results)


def _first_token_s(served: Served) -> float:
    return served.first_token_s - served.request.arrival_s


def main() -> int:
    """Entry point, with the file of a spec."""
    fields = json.loads(Path(sys.argv[1]).read_text())
    spec = EngineSpec(**{**fields, "gpus": tuple(fields["gpus"])})
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    path = os.environ.get(keys.ENV_SOCKET)
    gpus = [SharedGpu(Path(gpu)) for gpu in spec.gpus]
    hello = EngineHello("vllm", "0.32.0", spec.model, f"tp {len(gpus)}, pp 1")
    session = EngineSession(path, hello) if path else None
    engine = EngineProcess(spec, gpus, session)
    page = MetricsServer(spec.metrics_address, engine.metrics, Manner()) if spec.metrics_address else None
    try:
        engine.run(stop)
    finally:
        if session is not None:
            session.close()
        if page is not None:
            page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

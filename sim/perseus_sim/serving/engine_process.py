"""A serving engine as a process on simulated GPUs, in real time: ``python -m perseus_sim.serving.engine_process SPEC``
on this machine, ``python -m perseus_sim.serving.pod_engine`` in a pod.

It serves requests, its own and those of a router, at the clocks that are in effect on its GPUs, shows the metrics page
of vLLM, and reports to its node's agent after each step what it does, as vLLM does through the plugin: by the
production client, if PERSEUS_SOCKET names a socket. What became of the requests it says itself, so that no figure of
tests and demo comes from the agent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
from perseus_sim.serving.requests import Request
from perseus_sim.serving.traces import read_trace

_TICK_S: Final = 0.002
"""A change of the clocks is late by no more."""
_REPORT_S: Final = 0.5
VERSION: Final = "0.32.0"
"""Of vLLM, whose page it shows."""
PRODUCER: Final = "kv_producer"
CONSUMER: Final = "kv_consumer"


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    Attributes:
        gpus: files of the simulated GPUs that it has.
        gpu: the kind of GPU, one of ``machine.GPUS``.
        model: one of ``machine.MODELS``.
        trace: of its own requests; empty: it has none.
        results: file to which what became of them is written, one JSON object.
        metrics_address: host:port of its metrics page, and for requests of a router; empty: it has none.
        burst: a trace of which all requests come with SIGUSR1; empty: there is none.
        kv_role: ``kv_producer``: it computes prompts alone, ``kv_consumer``: it generates tokens after the first alone,
            as of vLLM's KV connectors; empty: both.
    """

    gpus: tuple[str, ...]
    gpu: str
    model: str
    trace: str = ""
    results: str = ""
    metrics_address: str = ""
    burst: str = ""
    kv_role: str = ""

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


@dataclass(frozen=True)
class Results:
    """What an engine has done so far.

    Attributes:
        begun_s: when its first request could come, of the machine's monotonic clock.
        joules: that its GPUs have drawn since.
        tokens: that it has generated.
        requests: that have ended, in that order: when each came (seconds since the engine began), its time to the first
            token and its mean time between tokens in seconds, and its tokens.
    """

    begun_s: float
    joules: float
    tokens: int
    requests: Sequence[tuple[float, float, float, int]]


class EngineProcess:
    """One engine with its GPUs.

    Args:
        machine: what it runs on.
        requests: in the order of arrival, from now on.
        gpus: as many as the machine has.
        session: to the agent; None: there is none.
        report: called now and then, and at the end, with what was done so far.
        kv_role: as of `EngineSpec`.
    """

    def __init__(
        self,
        machine: Machine,
        requests: Sequence[Request],
        gpus: Sequence[Gpu],
        session: EngineSession | None,
        report: Callable[[Results], None],
        *,
        kv_role: str = "",
    ) -> None:
        self.metrics = EngineMetrics()
        self._machine = machine
        self._session = session
        self._report = report
        self._ended: list[tuple[float, float, float, int]] = []
        self._tokens = 0
        self._bursts: deque[Sequence[Request]] = deque()
        self._group = GpuGroup(gpus, us_from_ns(time.monotonic_ns()))
        self._begun_s = time.monotonic()
        self._kv_role = kv_role
        self._live = LiveEngine(machine, parts_of(requests, kv_role), self.metrics, ended=self._step)

    def run(self, stop: threading.Event) -> None:
        """Serve until it is to stop."""
        report_s = 0.0
        while not stop.wait(_TICK_S):
            while self._bursts:
                self._live.burst(self._bursts.popleft())
            now_us = us_from_ns(time.monotonic_ns())
            self._live.set_clocks(*self._group.clocks_mhz(now_us))
            self._group.drew(self._live.joules, now_us)
            if time.monotonic() >= report_s:
                report_s = time.monotonic() + _REPORT_S
                self._report(self._results())
        self._report(self._results())

    def burst(self, requests: Sequence[Request]) -> None:
        """Let requests come now. A signal's handler may call it."""
        self._bursts.append(parts_of(requests, self._kv_role))

    def _results(self) -> Results:
        return Results(self._begun_s, self._live.joules, self._tokens, self._ended)

    def _step(self, step: EngineStep) -> None:
        for one in step.finished:
            self._ended.append((one.request.arrival_s, _first_token_s(one), one.per_token_s, one.request.output_tokens))
        generated = step.decoding + len(step.started)
        self._tokens += generated
        if self._session is None:
            return
        load = step.load
        self._session.step(
            min(1.0, load.kv_tokens / self._machine.kv_capacity),
            waiting=load.waiting,
            prefilling=load.prefilling,
            running=load.running,
            step_s=step.seconds,
            computes_prompt=step.prompt_tokens > 0,
            prompt_tokens=step.prompt_tokens,
            generated_tokens=generated,
            preempted=step.preempted,
            first_tokens_s=[_first_token_s(one) for one in step.started],
            tokens_s=[one.per_token_s for one in step.finished if one.request.output_tokens > 1],
            requests=len(step.finished),
            lengths=[(one.request.prompt_tokens, one.request.output_tokens) for one in step.finished],
        )


def parts_of(requests: Sequence[Request], kv_role: str) -> Sequence[Request]:
    """Return what an engine of this role does of requests.

    Where prompts and tokens are computed apart, the first token comes with the prompt. Keys and values of the prompt
    have come when the others are to be generated.
    """
    if kv_role == PRODUCER:
        return [replace(one, output_tokens=1) for one in requests]
    if kv_role == CONSUMER:
        return [
            Request(one.arrival_s, one.prompt_tokens + 1, one.output_tokens - 1, one.prompt_tokens)
            for one in requests
            if one.output_tokens > 1
        ]
    return requests


def _first_token_s(served: Served) -> float:
    return served.first_token_s - served.request.arrival_s


def open_session(model: str, parallel: int, kv_role: str = "") -> EngineSession | None:
    """A session with the node's agent; None: the environment names none."""
    path = os.environ.get(keys.ENV_SOCKET)
    flags = (("kv_transfer.kv_connector", "P2pNcclConnector"), ("kv_transfer.kv_role", kv_role)) if kv_role else ()
    return EngineSession(path, EngineHello("vllm", VERSION, model, f"tp {parallel}, pp 1", flags)) if path else None


def serve(process: EngineProcess, session: EngineSession | None, metrics_address: str) -> None:
    """Serve until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    page = None
    if metrics_address:
        page = MetricsServer(metrics_address, process.metrics, Manner(), submit=process.burst)
    try:
        process.run(stop)
    finally:
        if session is not None:
            session.close()
        if page is not None:
            page.close()


def main() -> int:
    """Entry point, with the file of a spec."""
    fields = json.loads(Path(sys.argv[1]).read_text())
    spec = EngineSpec(**{**fields, "gpus": tuple(fields["gpus"])})
    results = Path(spec.results)

    def write(current: Results) -> None:
        partial = results.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(current)))
        partial.replace(results)

    gpus = [SharedGpu(Path(gpu)) for gpu in spec.gpus]
    session = open_session(spec.model, len(gpus), spec.kv_role)
    machine, requests = Machine(spec.gpu, spec.model, len(gpus)), read_trace(Path(spec.trace)) if spec.trace else ()
    process = EngineProcess(machine, requests, gpus, session, write, kv_role=spec.kv_role)
    if spec.burst:
        burst = read_trace(Path(spec.burst))
        signal.signal(signal.SIGUSR1, lambda *_: process.burst(burst))
    serve(process, session, spec.metrics_address)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Whatever dies on a node that serves: how long its GPUs are still at a clock, and what the requests notice of it.

Engine, plugin, reader, agent, keeper and operator each end a hundred times, while eight engines on one GPU each
generate the tokens of requests. Real are all processes but the operator, whose end is that of its lease, and the GPUs,
which record each call. A request has failed when its engine ends by itself, and is delayed by us when the calls of the
plugin took more than a hundredth of its time; how many are when nothing ends is measured first. ``make bench
ONLY=engines_killed`` runs it in about ten minutes.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.bench.serving_node import FLOOR_MHZ, REPLICAS, lease_of
from tests.doubles.recording_node import JOB, RecordingNode, RunningEngine, pod_uid, wait_for

from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.metrics_server import Manner, MetricsServer

Result = dict[str, Any]
KILLS: Final = 100
ROUNDS: Final = -(-KILLS // REPLICAS)
"""In which all engines end at once."""
LEASE_S: Final = 0.5
WATCHED_S: Final = 0.2
"""How long clocks are watched after the keeper's end."""
REST_S: Final = 60.0
"""In which nothing ends."""
DELAYED: Final = 0.01
"""Share of a request's time that the plugin's calls may take."""
GPUS: Final = range(REPLICAS)


class Pool:
    """Eight engines that follow a table at its lowest clock, and what ends."""

    def __init__(self, node: RecordingNode, reader: Path) -> None:
        self._node, self._reader = node, reader
        self.engines: list[RunningEngine] = []
        self.died = 0
        """Engines that ended by themselves."""

    def start_agent(self) -> None:
        """An agent, and a keeper if there is none."""
        self._node.start_agent(f"--reader-socket={self._reader}")

    def start_engines(self) -> None:
        """All, with the plugin."""
        self.engines = [self._start_engine(number) for number in GPUS]

    def _start_engine(self, number: int) -> RunningEngine:
        pod = self._node.add_pod(number, [number])
        engine = self._node.start_engine(pod, requests=str(self._node.folder / f"requests-{number}"))
        engine.says(running=8)
        return engine

    @contextmanager
    def following(self, pages: Iterable[messages.EnginePage] = ()) -> Iterator[tuple[stubs.AgentStub, messages.Lease]]:
        """Under a lease, with every GPU at the table's clock."""
        with self._node.stub() as stub:
            lease = lease_of(stub, self._node, [*pages])
            wait_for(lambda: set(self._node.locked().values()) == {FLOOR_MHZ}, "all follow")
            yield stub, lease

    def default_s(self, begun_s: float) -> float:
        """The seconds from a moment until the last GPU is asked to run at its default clocks."""
        wait_for(self._node.all_default, "default clocks")
        asked_ns = {call.gpu: call.time_ns for call in self._node.calls() if call.mhz is None}
        (self._node.folder / "gpu" / "calls").unlink()
        return max(asked_ns.values()) / 1e9 - begun_s

    # ------------------------------------------------------------------------------------- what ends, and for how long

    def engine_killed(self) -> float:
        with self.following():
            begun_s = time.monotonic()
            for engine in self.engines:
                self.died += engine.process.poll() is not None
                engine.process.kill()
            took_s = self.default_s(begun_s)
        for engine in self.engines:
            engine.process.wait()
        self.start_engines()
        return took_s

    def plugin_hangs(self) -> float:
        with self.following():
            begun_s = time.monotonic()
            for engine in self.engines:
                engine.says(silent=True)
            took_s = self.default_s(begun_s)
        for engine in self.engines:
            engine.says(running=8)
        return took_s

    def plugin_stopped(self) -> float:
        with self.following():
            begun_s = time.monotonic()
            for engine in self.engines:
                engine.process.send_signal(signal.SIGSTOP)
            took_s = self.default_s(begun_s)
        for engine in self.engines:
            engine.process.send_signal(signal.SIGCONT)
        return took_s

    def operator_gone(self) -> float:
        """From the end of its lease."""
        with self.following() as (stub, lease):
            stub.RenewLease(messages.RenewLeaseRequest(job_uid=JOB, epoch=lease.epoch, ttl_ms=round(1000 * LEASE_S)))
            return self.default_s(time.monotonic() + LEASE_S)

    def agent_killed(self) -> float:
        with self.following():
            begun_s = time.monotonic()
            self._node.kill_agent()
            took_s = self.default_s(begun_s)
        self.start_agent()
        return took_s

    def keeper_killed(self) -> float:
        """How many GPUs' clocks change."""
        with self.following():
            self._node.kill_keeper()
            ends_s, changed = time.monotonic() + WATCHED_S, set[str]()
            while time.monotonic() < ends_s:
                changed |= {uuid for uuid, mhz in self._node.locked().items() if mhz != FLOOR_MHZ}
                time.sleep(0.01)
            seen = self._node.log().count(_WATCHED)
            self._node.start_keeper()
            wait_for(lambda: self._node.log().count(_WATCHED) > seen, "the next keeper watches")
        return len(changed)

    def reader_killed(self, pages: Iterable[messages.EnginePage]) -> float:
        """Of engines that are followed by their pages."""
        with self.following(pages):
            begun_s = time.monotonic()
            self._node.kill_reader()
            took_s = self.default_s(begun_s)
        self._node.start_reader()
        return took_s

    # -------------------------------------------------------------------------------------------------------- requests

    def requests(self) -> tuple[int, int]:
        """How many requests ended, and how many of them we delayed."""
        lines = [line for number in GPUS for line in (self._node.folder / f"requests-{number}").read_text().split("\n")]
        times_ns = [tuple(map(int, line.split())) for line in lines if line]
        return len(times_ns), sum(ours_ns > DELAYED * all_ns for all_ns, ours_ns in times_ns)


_WATCHED: Final = "a clock keeper watches"


def killed() -> Result:
    """The figures."""
    worst: dict[str, float] = {}

    def times(name: str, count: int, *ends: Callable[[], float]) -> None:
        for number in range(count):
            worst[name] = max(worst.get(name, 0.0), ends[number % len(ends)]())

    with tempfile.TemporaryDirectory() as name, RecordingNode.open(Path(name), gpus=REPLICAS) as node:
        pool = Pool(node, node.start_reader())
        pool.start_agent()
        with _pages() as pages:
            times("reader", KILLS, lambda: pool.reader_killed(pages))
        pool.start_engines()
        with pool.following():
            time.sleep(REST_S)
        at_rest, delayed_at_rest = pool.requests()
        times("plugin", ROUNDS, pool.plugin_hangs, pool.plugin_stopped)
        times("operator", KILLS, pool.operator_gone)
        times("keeper", KILLS, pool.keeper_killed)
        times("agent", KILLS, pool.agent_killed)
        times("engine", ROUNDS, pool.engine_killed)
        requests, delayed = pool.requests()
    changed = worst.pop("keeper")
    figures: Result = {
        f"serving_killed_{part}_default_s_max": {"value": took_s, "unit": "s"} for part, took_s in worst.items()
    }
    return {
        "serving_default_s_max": {"value": max(worst.values()), "unit": "s"},
        **figures,
        "serving_killed_keeper_clocks_changed": {"value": changed, "unit": "GPUs"},
        "serving_killed_requests": {"value": requests - at_rest, "unit": "requests"},
        "serving_killed_requests_failed": {"value": pool.died, "unit": "engines"},
        "serving_killed_requests_delayed": {
            "value": delayed - delayed_at_rest,
            "unit": "requests",
            "peer": f"of {at_rest} while nothing ends",
            "peer_value": delayed_at_rest,
        },
    }


@contextmanager
def _pages() -> Iterator[list[messages.EnginePage]]:
    """The pages of eight engines that are busy, as slow as real ones."""
    with contextlib.ExitStack() as stack:
        pages = []
        for number in GPUS:
            metrics = EngineMetrics()
            metrics.set_load(waiting=0, running=8, kv_share=0.3)
            server = stack.enter_context(contextlib.closing(MetricsServer("127.0.0.1:0", metrics, Manner())))
            host, _, port = server.address.rpartition(":")
            pages.append(messages.EnginePage(pod_uid=pod_uid(number), host=host, port=int(port), path="/metrics"))
        yield pages


FIGURES: dict[str, Callable[[], Result]] = {"engines_killed": killed}

"""``make demo-serving``: three replicas of an engine on this machine, first at default clocks, then at their load's.
It ends with 0 only if all of it happened.

What is printed comes from three sources: the ServingPool's status as any user reads it, the engines' own account of
their requests, and the simulated GPUs' clocks and counters. Nothing runs faster than a real one would. The load repeats
itself, so that the two replicas beside the canary serve the same requests at default clocks and under the law.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from kubernetes import client

from perseus_core import keys
from perseus_sim.cluster.live_engines import Ended, LiveEngines, start_engines
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.demo.observer import DemoFailed, condition
from perseus_sim.demo.serving_report import LoadSpan, ServingResults, write_serving_report
from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.load import Chat
from perseus_sim.serving.requests import Request

T = TypeVar("T")
REPOSITORY: Final = Path(__file__).resolve().parents[3]
CRDS: Final = REPOSITORY / "deploy" / "crds"
SAMPLE: Final = REPOSITORY / "deploy" / "samples" / "servingpool.yaml"
NAME: Final = "llama-8b"
GPU, MODEL = "h100", "llama-3.1-8b"
REPLICAS: Final = 3
PERIOD_S: Final = 16.0
"""After which the same requests come again."""
_PERIODS: Final = 60
_CHAT: Final = Chat(per_second=2.5)
_BURST: Final = Chat(per_second=15.0)
_BURST_S: Final = 1.0
FIRST_TOKEN_S, PER_TOKEN_S = 0.25, 0.025
LOWEST_MHZ: Final = 1600
"""Each clock that the canary tries takes some ten seconds."""
_WHERE: Final = (keys.API_GROUP, keys.API_VERSION, "default", keys.POOL_PLURAL, NAME)
_PATIENCE_S: Final = 240.0
_LOOK_S: Final = 0.02
_BACK_S: Final = 1.0
"""Within which clocks are the default ones once an engine is silent."""
_SAVED: Final = 0.1
"""What the law saves at least of the joules for each token."""


@dataclass
class ClockLog:
    """The locked clocks of the replicas, read from their GPUs every few milliseconds on a thread of its own.

    Attributes:
        seen: by replica, its changes: when (monotonic), and the clock, MHz, 0 for the default clocks.
        watts: when, and what all GPUs have drawn since the last time.
    """

    engines: LiveEngines
    seen: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    watts: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clocks", daemon=True)
        self.seen = {pod: [] for pod in self.engines.pods}
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._thread.join()

    def first(self, pod: str, since_s: float, wanted: Callable[[int], bool]) -> float | None:
        """When a replica had a wanted clock first, from a moment on; None: it has not."""
        before = [mhz for at_s, mhz in self.seen[pod] if at_s <= since_s][-1:]
        if before and wanted(before[0]):
            return since_s
        return next((at_s for at_s, mhz in self.seen[pod] if at_s > since_s and wanted(mhz)), None)

    def _run(self) -> None:
        joules, at_s = self._joules(), time.monotonic()
        while not self._stopped.wait(_LOOK_S):
            now_s = time.monotonic()
            for pod, changes in self.seen.items():
                mhz = min(self.engines.locked_mhz(pod))
                if not changes or changes[-1][1] != mhz:
                    changes.append((now_s, mhz))
            if now_s - at_s >= 1.0:
                drawn = self._joules()
                self.watts.append((now_s, (drawn - joules) / (now_s - at_s)))
                joules, at_s = drawn, now_s

    def _joules(self) -> float:
        return sum(map(self.engines.joules, self.engines.pods))


class ServingDemo:
    """One run of the demo."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._started_s = time.monotonic()
        self._lines: list[str] = []

    def run(self) -> None:
        """Run the scenario.

        Raises:
            DemoFailed: something did not happen as it should.
        """
        with SimulatedCluster() as cluster:
            self._objects = client.CustomObjectsApi(cluster.api)
            try:
                self._run_scenario(cluster)
            except DemoFailed:
                self._say(f"logs of every process: {cluster.folder / 'logs'}")
                raise

    def _run_scenario(self, cluster: SimulatedCluster) -> None:
        engines = self._start(cluster)
        clocks = ClockLog(engines)
        try:
            canary = self._start_trials(cluster)
            others = [pod for pod in engines.pods if pod != canary]
            before = self._measure(engines, others, "the others at default clocks")
            self._await_law()
            law = self._measure(engines, others, "the same under the law")
            saved = 1 - law.joules_per_token / before.joules_per_token
            self._say(f"the same requests again, for {saved:.1%} less energy a token")
            self._require(saved > _SAVED, f"the law saves only {saved:.1%}")
            burst = self._burst(engines, clocks)
            silence_s = self._fall_silent(engines, clocks)
            self._release(engines)
        finally:
            clocks.stop()
            engines.stop()
        ended = [one for pod in engines.pods for one in self._ended(engines, pod)]
        results = ServingResults(
            gpu=MODELS[GPU].name.removesuffix(" (simulated)"),
            highest_mhz=MODELS[GPU].max_clock_mhz,
            limits_s=(FIRST_TOKEN_S, PER_TOKEN_S),
            began_s=self._started_s,
            before=before,
            law=law,
            burst=burst,
            silence_s=silence_s,
            clocks=clocks.seen,
            watts=clocks.watts,
            ended=ended,
        )
        for path in write_serving_report(results, self._output, self._lines):
            self._say(f"wrote {path}")

    def _start(self, cluster: SimulatedCluster) -> LiveEngines:
        self._say(f"starting an embedded API server, the operator, and a node with {REPLICAS} GPUs, {MODELS[GPU].name}")
        cluster.apply(CRDS)
        cluster.start_operator()
        node = cluster.add_node("node-0", REPLICAS, MODELS[GPU], driver=GPU)
        requests = [self._requests(replica) for replica in range(REPLICAS)]
        burst = _BURST.requests(_BURST_S, seed=99)
        engines = start_engines(cluster, node, NAME, requests, gpu=GPU, model=MODEL, burst=burst)
        self._wait(lambda: all(map(engines.results, engines.pods)) or None, "engines that serve")
        self._say(
            f"{REPLICAS} replicas of {MODEL} serve, one GPU each; no pod, flag or replica of theirs is ever changed"
        )
        return engines

    def _requests(self, replica: int) -> tuple[Request, ...]:
        chats = _CHAT.requests(PERIOD_S, seed=replica)
        return tuple(
            Request(one.arrival_s + PERIOD_S * period, one.prompt_tokens, one.output_tokens)
            for period in range(_PERIODS)
            for one in chats
        )

    def _measure(self, engines: LiveEngines, pods: Sequence[str], what: str) -> LoadSpan:
        """One period of the load at some replicas."""
        begin_s = time.monotonic()
        before = [engines.results(pod) for pod in pods]
        time.sleep(PERIOD_S)
        end_s = time.monotonic()
        after = [engines.results(pod) for pod in pods]
        joules = sum(b.joules - a.joules for a, b in zip(before, after, strict=True) if a and b)
        tokens = sum(b.tokens - a.tokens for a, b in zip(before, after, strict=True) if a and b)
        time.sleep(1.0)  # for the last that came to end
        span = LoadSpan(begin_s, end_s, joules, tokens, self._between(engines, pods, begin_s, end_s))
        self._say(
            f"{what}: {len(span.ended)} requests, {span.joules_per_token:.2f} J a token, {joules / PERIOD_S:.0f} W; "
            f"{self._late(span.ended)}"
        )
        return span

    def _start_trials(self, cluster: SimulatedCluster) -> str:
        """Returns the canary, which is tried at lower clocks from now on."""
        cluster.apply(_manifest())
        self._say(
            f"applied ServingPool {NAME}, as in {SAMPLE.relative_to(REPOSITORY)}: first token within "
            f"{1000 * FIRST_TOKEN_S:.0f} ms, {1000 * PER_TOKEN_S:.0f} ms a token, for 99 %"
        )
        self._wait(lambda: self._true("SignalsReady"), "engines that say what they do")
        self._say(f"signals: {self._message('SignalsReady')}")
        self._wait(lambda: self._status().get("canary"), "a canary")
        canary = str(self._status()["canary"]["pod"])
        self._say(f"one replica, {canary}, is tried at lower clocks; the others stay at their default clocks")
        return canary

    def _await_law(self) -> None:
        self._wait(lambda: self._true("ProfileReady"), "a model of the engine")
        self._say(f"profile: {self._message('ProfileReady')}")
        self._wait(lambda: self._true("ClocksApplied"), "clocks that follow the load")
        self._say(f"clocks: {self._message('ClocksApplied')}")
        self._wait(self._explored, "an end of the trials")
        self._say("the canary has tried every clock that it may, and follows the load, too")

    def _explored(self) -> bool | None:
        canary = self._status().get("canary") or {}
        return True if not canary.get("clockMegahertz") else None

    def _burst(self, engines: LiveEngines, clocks: ClockLog) -> LoadSpan:
        """Many requests come at once."""
        pod = list(engines.pods)[-1]
        low_mhz = self._wait(lambda: min(engines.locked_mhz(pod)), "a locked clock")
        begin_s = time.monotonic()
        engines.signal(pod, signal.SIGUSR1)
        raised_s = self._wait(
            lambda: clocks.first(pod, begin_s, lambda mhz: mhz == 0 or mhz > low_mhz), "a raised clock"
        )
        time.sleep(_BURST_S + 4.0)
        end_s = time.monotonic()
        ended = [one for one in self._ended(engines, pod) if begin_s <= one.arrival_s <= begin_s + _BURST_S]
        self._say(
            f"a burst: {len(ended)} requests come to {pod} within a second; its clocks are up after "
            f"{1000 * (raised_s - begin_s):.0f} ms; {self._late(ended)}"
        )
        late = sum(not _kept(one) for one in ended)
        self._require(len(ended) > 0, "the burst did not come")
        self._require(late <= len(ended) // 20, f"{late} of {len(ended)} requests of the burst were late")
        return LoadSpan(begin_s, end_s, 0.0, 0, tuple(ended))

    def _fall_silent(self, engines: LiveEngines, clocks: ClockLog) -> float:
        """An engine hangs."""
        pod = next(iter(engines.pods))
        self._wait(lambda: min(engines.locked_mhz(pod)) > 0 or None, "a locked clock")
        begin_s = time.monotonic()
        engines.signal(pod, signal.SIGSTOP)
        back_s = self._wait(lambda: clocks.first(pod, begin_s, lambda mhz: mhz == 0), "default clocks") - begin_s
        self._say(f"{pod} hangs and says nothing: its GPU is at its default clocks after {1000 * back_s:.0f} ms")
        self._require(back_s <= _BACK_S, f"default clocks only after {back_s:.2f} s")
        engines.signal(pod, signal.SIGCONT)
        self._wait(lambda: min(engines.locked_mhz(pod)) > 0 or None, "a clock for the engine that goes on")
        self._say(f"{pod} goes on, and its clock follows its load again")
        return back_s

    def _release(self, engines: LiveEngines) -> None:
        self._objects.delete_namespaced_custom_object(*_WHERE)
        self._wait(lambda: not any(max(engines.locked_mhz(pod)) for pod in engines.pods) or None, "default clocks")
        self._say(f"ServingPool deleted: all {REPLICAS} GPUs at their default clocks; the engines serve on")
        for pod, child in engines.children.items():
            self._require(child.running, f"{pod} has ended: {child.tail()}")

    # ------------------------------------------------------------------------------------------- details

    def _status(self) -> dict[str, Any]:
        stored: Any = self._objects.get_namespaced_custom_object(*_WHERE)
        return dict(stored.get("status") or {})

    def _true(self, kind: str) -> bool | None:
        return condition(self._status(), kind).get("status") == "True" or None

    def _message(self, kind: str) -> str:
        return str(condition(self._status(), kind)["message"])

    def _ended(self, engines: LiveEngines, pod: str) -> tuple[Ended, ...]:
        results = engines.results(pod)
        return results.ended if results else ()

    def _between(self, engines: LiveEngines, pods: Sequence[str], begin_s: float, end_s: float) -> tuple[Ended, ...]:
        every = (one for pod in pods for one in self._ended(engines, pod))
        return tuple(one for one in every if begin_s <= one.arrival_s < end_s)

    def _late(self, ended: Sequence[Ended]) -> str:
        late = sum(not _kept(one) for one in ended)
        return "none is late" if not late else f"{late} of {len(ended)} are late"

    def _wait(self, look: Callable[[], T | None], what: str) -> T:
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            result = look()
            if result:
                return result
            time.sleep(0.05)
        raise DemoFailed(f"no {what} within {_PATIENCE_S:.0f} s; the status says {self._status()}")

    def _require(self, true: bool, otherwise: str) -> None:
        if not true:
            raise DemoFailed(otherwise)

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._started_s:5.1f} s  {text}"
        self._lines.append(line)
        print(line, flush=True)


def _manifest() -> dict[str, Any]:
    """The sample, for this model and its limits."""
    manifest: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    manifest["metadata"]["name"] = NAME
    spec = manifest["spec"]
    del spec["workload"]
    spec["clocks"] = {"minimumMegahertz": LOWEST_MHZ}
    spec["objective"]["timeToFirstToken"]["limit"] = f"{1000 * FIRST_TOKEN_S:g}ms"
    spec["objective"]["timePerOutputToken"]["limit"] = f"{1000 * PER_TOKEN_S:g}ms"
    return manifest


def _kept(one: Ended) -> bool:
    return one.first_token_s <= FIRST_TOKEN_S and one.per_token_s <= PER_TOKEN_S

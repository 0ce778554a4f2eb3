"""A serving pool: one engine with one GPU on each node, which says after each step what it did.

How long a step takes, and what it draws, follow from a model, the clock in effect and the load. Counts are written to
the shared memory that the agent reads, by the writer of the real channel; the connection is made again when the agent
has gone. What such an engine does at several clocks is in a PerseusProfile, as an earlier operator has stored it: to
try clocks takes longer than a seed lasts.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from tests.doubles.stored_objects import stored_object
from tests.simulation.api import ApiServer
from tests.simulation.gpus import CLOCKS_MHZ, MODEL, Gpu, SimulatedDevices
from tests.simulation.node import SimulatedNode
from tests.simulation.scheduler import NS, Process, Scheduler

from perseus_agent.node.processes import ServingSession
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_core import keys
from perseus_core.serving import MOST_SEQUENCES, place_of
from perseus_operator.api.schema import dump
from perseus_operator.api.stored import EngineProfile, ProfileSpec
from perseus_operator.families.serving.profiles import profile_name
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import Json, Pod
from perseus_proto import engine_channel
from perseus_proto.engine_channel import EngineReader, EngineWriter
from perseus_proto.engine_hello import EngineHello
from perseus_solver.serving import Fingerprint, StepModel, WattModel, Window, windows_to_csv

NAMESPACE: Final = "team-b"
POOL: Final = "pool"
BUDGET_OF_POOL: Final = "servers"
WATTS_OF_POOL: Final = (440.0, 660.0)
"""Of both engines, at the lowest clock and at default clocks: 430 and 620 W."""
HIGHEST_MHZ: Final = CLOCKS_MHZ[-1]
STEPS: Final = StepModel(
    highest_mhz=HIGHEST_MHZ,
    host_s=8e-3,
    launch_s=4e-3,
    weights_s=60e-3,
    token_s=250e-6,
    kv_token_s=50e-9,
    sequence_s=200e-6,
    sampling_s=200e-6,
    knee_mhz=990.0,
)
WATTS: Final = WattModel(
    highest_mhz=HIGHEST_MHZ,
    idle_w=84.0,
    clock_w=40.0,
    byte_w=90.0,
    die_w=120.0,
    sequence_j=0.05,
    token_j=0.02,
    floor_mhz=600.0,
)
SPEC: Final[Json] = {
    "mode": "Enforce",
    "objective": {"timeToFirstToken": {"limit": "500ms"}, "timePerOutputToken": {"limit": "115ms"}},
    "clocks": {"minimumMegahertz": 885},
    "scaling": "Off",
}
MEASURED_MHZ: Final = (885, 990, 1095, 1200, 1305, HIGHEST_MHZ)
MEASURED_LOADS: Final = (2, 4, 8, 12, 16, 32)
LOADS: Final = (2, 4, 8, 16)
"""Requests that decode; one of these for some seconds."""
KV_CAPACITY: Final = 1_000_000
KV_TOKENS: Final = KV_CAPACITY // 128
"""Of a request."""
CHUNK_TOKENS: Final = 512
"""Of a prompt, which is one step."""
LOAD_S: Final = 12.0
PROMPT_S: Final = 3.0
"""Between two prompts, mean."""
ENDS_S: Final = 1.0
"""Between two requests that end, mean."""
BEAT_S: Final = 0.05
RECONNECT_S: Final = 1.0
RESTART_S: Final = (0.5, 3.0)
"""Until the kubelet starts a container again."""
OWN: Final = "model-a"
"""What the engines run, unless a user has them run another."""


@cache
def cost(clock_mhz: int, running: int, chunk: int) -> tuple[float, float]:
    """Seconds and watts of a step."""
    seconds = STEPS.step_s(clock_mhz, running, running * KV_TOKENS, chunk)
    return seconds, WATTS.joules(STEPS, clock_mhz, running, running * KV_TOKENS, chunk) / seconds


@cache
def profile() -> tuple[str, Json]:
    """Name and spec of the PerseusProfile of such an engine."""
    fingerprint = Fingerprint(
        model=OWN,
        engine="simulated",
        engine_version="1.0",
        gpu_model=f"1 x {MODEL}",
        driver_version=SimulatedDevices.driver_version,
        parallelism="tp 1",
        flags=(),
    ).digest
    engine = EngineProfile(
        fingerprint=fingerprint,
        engine="simulated 1.0",
        model=OWN,
        windows=windows_to_csv(_windows()),
        prompt_tokens=CHUNK_TOKENS,
        measured_at=stamp(1_700_000_000.0),
    )
    return profile_name(fingerprint), dump(ProfileSpec(serving=engine))


def _windows() -> list[Window]:
    """What was measured of such an engine: six times each load at each clock, half of them with a prompt."""
    draw, windows = random.Random(1), []
    for clock_mhz in MEASURED_MHZ:
        for number in range(36):
            running, prompts = MEASURED_LOADS[number % 6], number // 6 % 2
            (step_s, step_w), (prompt_s, prompt_w) = cost(clock_mhz, running, 0), cost(clock_mhz, running, CHUNK_TOKENS)
            seconds = 12 * step_s + prompts * prompt_s
            windows.append(
                Window(
                    clock_mhz=clock_mhz,
                    seconds=seconds,
                    running=running,
                    kv_tokens=running * KV_TOKENS,
                    steps=12,
                    step_s=step_s * draw.uniform(0.998, 1.002),
                    prompt_steps=prompts,
                    prompt_step_s=prompts * prompt_s * draw.uniform(0.998, 1.002),
                    prompt_tokens=prompts * CHUNK_TOKENS,
                    watts=(12 * step_s * step_w + prompts * prompt_s * prompt_w) / seconds * draw.uniform(0.99, 1.01),
                )
            )
    return windows


@dataclass
class Engine:
    """A process that serves."""

    node: SimulatedNode
    gpu: Gpu
    pod_uid: str
    model: str
    process: Process
    pid: int
    started_ns: int
    running: int = 0
    waiting: list[int] = field(default_factory=list)
    """When each prompt came that waits."""
    prompt_ns: int = 0
    """When the prompt came that the last step computed; 0: it computed none."""
    step_s: float = 0.0
    """That it took."""
    hangs: bool = False
    lie: float | None = None
    """It writes what cannot be true, in a way that this value says."""
    idle: bool = False
    """Nobody asks it for anything."""
    session: ServingSession | None = None
    writer: EngineWriter | None = None
    agent: Process | None = None


class Serving:
    """The pool, as its user has made it, its pods and their engines."""

    def __init__(self, scheduler: Scheduler, api: ApiServer, nodes: Mapping[str, SimulatedNode]) -> None:
        self.scheduler = scheduler
        self.nodes = nodes
        self.spec: Json = dict(SPEC)
        self.uid = ""
        """Of the ServingPool; empty: there is none."""
        self.model = OWN
        """What an engine runs that is started."""
        self.pods: dict[str, Pod] = {}
        """By node."""
        self.engines: dict[str, Engine] = {}
        """By node; the last one of each, which may have ended."""
        self.changed_ns = 0
        """When an engine was started, or which pods there are was changed."""
        self._api = api
        self._number = 0
        name, spec = profile()
        api.profiles[name] = stored_object(name, spec)

    # ------------------------------------------------------------------------------------------------ users

    def apply(self) -> None:
        """A user creates the ServingPool."""
        self.uid = f"uid-{POOL}-{self.scheduler.random.getrandbits(32)}"
        self.edit({})

    def edit(self, changes: Mapping[str, Any]) -> None:
        """A user edits its spec."""
        self.spec = {**self.spec, **changes}
        if self.uid:
            self._api.apply(NAMESPACE, POOL, self.uid, json.loads(json.dumps(self.spec)), keys.POOL_KIND)

    def delete(self) -> None:
        """A user deletes it; engines go on."""
        if self.uid:
            self._api.delete(self.uid)
            self.uid = ""

    def start_pod(self, node: str) -> None:
        """A pod is bound to a node, and its engine starts."""
        self._number += 1
        name = f"{POOL}-{node}"
        labels = {keys.LABEL_JOB: POOL}
        self.pods[node] = Pod(f"pod-of-engine-{self._number}", NAMESPACE, name, node, POOL, labels)
        self.nodes[node].kubelet.given[NAMESPACE, name] = (self.nodes[node].gpus[-1].uuid,)
        self._pods_changed()
        self.start_engine(node)

    def end_pod(self, node: str) -> None:
        """It is deleted."""
        self.end_engine(node)
        if self.pods.pop(node, None) is not None:
            self.nodes[node].kubelet.given.pop((NAMESPACE, f"{POOL}-{node}"), None)
            self._pods_changed()

    def _pods_changed(self) -> None:
        self.changed_ns = self.scheduler.now_ns
        others = [pod for pod in self._api.pods if pod.namespace != NAMESPACE]
        self._api.put_pods([*others, *self.pods.values()])

    # ------------------------------------------------------------------------------------------------ engines

    def start_engine(self, node: str) -> None:
        """The container of a node's pod starts its engine, if none runs."""
        pod, before = self.pods.get(node), self.engines.get(node)
        if pod is None or not self.nodes[node].up or (before is not None and before.process.alive):
            return
        self._number += 1
        process, now_ns = Process(f"{POOL}/{node}"), self.scheduler.now_ns
        gpu = self.nodes[node].gpus[-1]
        engine = Engine(self.nodes[node], gpu, pod.uid, self.model, process, 1_000 + self._number, now_ns)
        self.engines[node], self.changed_ns = engine, now_ns
        self.scheduler.spawn(process, "serve", lambda: self._serve(engine))
        self.scheduler.spawn(process, "connect", lambda: self._connect(engine))

    def end_engine(self, node: str) -> None:
        """SIGKILL."""
        engine = self.engines.get(node)
        if engine is None or not engine.process.alive:
            return
        self.scheduler.kill(engine.process)
        engine.gpu.execute(0.0)
        if engine.session is not None and engine.agent is not None:
            session, agent = engine.session, engine.agent
            self.scheduler.after(0.001, lambda: engine.node.leave(session, agent))

    def restart_engine(self, node: str) -> None:
        """It is killed, and the kubelet starts it again."""
        self.end_engine(node)
        self.scheduler.after(self.scheduler.random.uniform(*RESTART_S), lambda: self.start_engine(node))

    def replace(self, node: str, model: str) -> None:
        """A user has an engine run another model."""
        self.model = model
        self.restart_engine(node)

    def _serve(self, engine: Engine) -> None:
        scheduler, draw = self.scheduler, self.scheduler.random
        load_ns, prompt_ns = 0, scheduler.now_ns
        while True:
            if engine.hangs:
                scheduler.pause(BEAT_S)
                continue
            if scheduler.now_ns >= load_ns:
                engine.running = draw.choice(LOADS)
                load_ns = scheduler.now_ns + int(draw.uniform(0.5, 1.5) * LOAD_S * NS)
            if engine.idle:
                engine.waiting.clear()
                self._rest(engine)
                continue
            self._step(engine)
            if scheduler.now_ns >= prompt_ns:  # it came while the step was computed
                engine.waiting.append(scheduler.now_ns)
                prompt_ns = scheduler.now_ns + int(draw.expovariate(1 / PROMPT_S) * NS)
            self._say(engine)

    def _rest(self, engine: Engine) -> None:
        """Nothing is to be done: the engine's last step has said so, and beats go on."""
        writer = engine.writer
        if writer is not None and (engine.running or engine.lie is not None):
            writer.step(0, 0, 0, 0, step_us=None)
            self._lie(engine, writer)
        if writer is not None:
            writer.beat()
        engine.running = 0
        engine.gpu.execute(0.0)
        self.scheduler.pause(BEAT_S)

    def _step(self, engine: Engine) -> None:
        engine.running = engine.running or LOADS[0]
        engine.prompt_ns = engine.waiting.pop(0) if engine.waiting else 0
        takes_s, watts = cost(engine.gpu.clock_mhz, engine.running, CHUNK_TOKENS if engine.prompt_ns else 0)
        engine.step_s = takes_s * self.scheduler.random.uniform(0.998, 1.002)
        engine.gpu.execute(watts)
        self.scheduler.pause(engine.step_s)

    def _say(self, engine: Engine) -> None:
        """Write what the step did, and the load after it."""
        writer, prompt, now_ns = engine.writer, engine.prompt_ns > 0, self.scheduler.now_ns
        if writer is None:
            return
        ends = self.scheduler.random.random() < engine.step_s / ENDS_S
        if ends or prompt:
            first = [place_of((now_ns - engine.prompt_ns) / NS)] if prompt else []
            token_s, _ = cost(engine.gpu.clock_mhz, engine.running, 0)
            writer.count_times(first, [place_of(token_s)] if ends else [])
        writer.step(
            len(engine.waiting),
            0,
            engine.running,
            1_000_000 * engine.running * KV_TOKENS // KV_CAPACITY,
            step_us=int(engine.step_s * 1e6),
            computes_prompt=prompt,
            prompt_tokens=CHUNK_TOKENS if prompt else 0,
            generated_tokens=engine.running,
            requests=int(ends),
        )
        self._lie(engine, writer)

    @staticmethod
    def _lie(engine: Engine, writer: EngineWriter) -> None:
        if engine.lie is not None:
            lie(writer, int(engine.lie * 4))

    def _connect(self, engine: Engine) -> None:
        """Keep a connection to the node's agent, as the client does."""
        scheduler = self.scheduler
        while True:
            if engine.session is not None and (
                engine.agent is None or not engine.agent.alive or engine.session.dismissed
            ):
                engine.session = engine.writer = engine.agent = None
                scheduler.pause(scheduler.random.uniform(0.1, RECONNECT_S))
            if engine.session is None:
                reader = EngineReader.create()
                memory, bell = os.dup(reader.memory_fd), os.dup(reader.event_fd)
                hello = EngineHello("simulated", "1.0", engine.model, "tp 1")
                peer = Peer(engine.pid, 1000, engine.started_ns, PodProcess(engine.pod_uid, None), None)
                session = ServingSession(peer, hello, reader, lambda: None)
                engine.agent = engine.node.admit(session)
                if engine.agent is not None:
                    engine.session, engine.writer = session, EngineWriter(memory, bell)
                else:
                    os.close(memory)
                    os.close(bell)
                    reader.close()
            scheduler.pause(RECONNECT_S)


def lie(writer: EngineWriter, way: int) -> None:
    """Change what an engine's last step has written to what cannot be true: as a tenant's process may."""
    counts = list(writer._sums)
    if way == 0:  # more requests than any engine runs
        counts[4] = MOST_SEQUENCES + 1
    elif way == 1:  # counts that fall
        counts[12] = (1 << 39) - counts[12]
        counts[15] = (1 << 39) - 1000 * counts[0]
    elif way == 2:  # more memory than there is
        counts[5] = 4_000_000_000
    place = engine_channel._RECORD
    record = engine_channel._COUNTS.pack(*counts)
    torn = way == 3
    check = engine_channel._CHECK.pack(zlib.crc32(record) ^ torn)
    writer._map[place : place + len(record) + len(check)] = record + check

"""One node around a real agent process: the base of the agent's tests and benchmarks.

Real: the agent (a process), its gRPC and Unix sockets, trainers (processes with the real client), kill -9. Simulated:
GPUs (``recording_gpu``), the kubelet and /proc.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tests.doubles import recording_gpu
from tests.doubles.recording_trainer import schedule_of
from tests.waiting import PATIENCE_S

from perseus_proto.planset import PlanPoint, StageSchedule, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_sim.gpus.kubelet import AdmittedPod, KubeletDouble

JOB = "job-uid"
_REPOSITORY = Path(__file__).resolve().parents[2]
"""The processes import ``tests.doubles`` from there."""
_PROGRAM = [sys.executable, "-m", "perseus_agent"]
_CROWD = """
import os, socket, sys
sys.stdin.readline()
noise = os.urandom(4096)
while True:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.setblocking(False)
            one.connect(sys.argv[1])
            one.send(noise)
        except OSError:
            pass
"""
"""Program that connects to the socket again and again, and sends it noise."""


def gpu_uuid(number: int) -> str:
    """A UUID as the driver writes it."""
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


def pod_uid(number: int) -> str:
    """A UID as Kubernetes writes it."""
    return f"11111111-2222-3333-4444-{number:012d}"


def plan_set_of(
    clocks_mhz: Sequence[Sequence[Sequence[int]]],
    *,
    first_stage: int = 0,
    schedule: Sequence[tuple[str, int, int]] = (),
) -> Any:
    """A plan set of ``[stage][point][instruction]`` clocks for ``schedule_of``."""
    order = schedule or schedule_of(len(clocks_mhz[0][0]))
    kinds = tuple({"forward": 1, "backward": 2}[kind] for kind, _, _ in order)
    stages = [
        StageSchedule(first_stage + index, kinds, tuple(i[1] for i in order), tuple(i[2] for i in order))
        for index in range(len(clocks_mhz))
    ]
    points = [PlanPoint(1_000_000 + point, 1_000_000 - point) for point in range(len(clocks_mhz[0]))]
    return encode_plan_set(stages, points, clocks_mhz)


@dataclass
class RunningEngine:
    """A process of ``tests.doubles.recording_engine``."""

    process: subprocess.Popen[bytes]

    def says(self, **load: Any) -> None:
        """Have it say this load from now on."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(load).encode() + b"\n")
        self.process.stdin.flush()


@dataclass
class RecordingNode:
    """The node. ``with RecordingNode.open(folder) as node``."""

    folder: Path
    gpus: int
    kubelet: KubeletDouble
    agent: subprocess.Popen[bytes] | None = None
    keeper: subprocess.Popen[bytes] | None = None
    reader: subprocess.Popen[bytes] | None = None
    addresses: dict[str, Any] = field(default_factory=dict)
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _settings: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, gpus: int = 2) -> Iterator[RecordingNode]:
        """Make the folders and the kubelet; at the end kill what is left."""
        for name in ("gpu", "run"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        node = cls(folder, gpus, KubeletDouble(folder / "run"))
        (folder / "gpu" / "gpus").write_text(" ".join(map(gpu_uuid, range(gpus))))
        node.kubelet.start()
        try:
            yield node
        finally:
            for child in node._children:
                child.kill()
                child.wait()
                if child.stdin:
                    child.stdin.close()
            node.kubelet.stop()
            if (folder / "agent.log").exists():
                print(node.log())  # shown where a test fails

    # ------------------------------------------------------------------------------------------- agent

    def start_agent(
        self,
        *flags: str,
        secure: bool = False,
        wait: bool = True,
        opener: str = "open_devices",
        prefix: Sequence[str] = (),
        kept: bool = True,
    ) -> subprocess.Popen[bytes]:
        """A new agent process on this node, and a keeper if none runs.

        Args:
            flags: further ones, of both.
            secure: the flags name certificates.
            wait: until the agent serves.
            opener: a function of ``recording_gpu``.
            prefix: a command that starts the agent's.
            kept: False: start no keeper.
        """
        self._settings = [
            f"--devices=tests.doubles.recording_gpu:{opener}:{self.folder / 'gpu'}",
            f"--socket={self.socket}",
            "--grpc-address=127.0.0.1:0",
            "--metrics-address=127.0.0.1:0",
            f"--journal={self.folder / 'journal.json'}",
            f"--keeper-socket={self.folder / 'run' / 'keeper.sock'}",
            f"--proc-root={self.kubelet.proc_root}",
            f"--pod-resources-socket={self.kubelet.socket}",
            f"--ready-file={self._ready}",
            "--node-name=node-under-test",
            *([] if secure else ["--insecure"]),
            *flags,
        ]
        self._ready.unlink(missing_ok=True)
        if kept and (self.keeper is None or self.keeper.poll() is not None):
            self.start_keeper()
        self.agent = process = self._start([*prefix, *_PROGRAM, *self._settings])
        if wait:
            wait_for(lambda: self._ready.exists() or process.poll() is not None, "the agent serves")
            if not self._ready.exists():
                raise AssertionError(self.log())
            self.addresses = json.loads(self._ready.read_text())
        return self.agent

    def start_keeper(self) -> None:
        """With the settings of the agent that was started last."""
        self.keeper = self._start([*_PROGRAM, "keep", *self._settings])

    def start_reader(self) -> Path:
        """The process that reads pages of engines; returns its socket, and ``reader`` is the process."""
        path = self.folder / "run" / "reader.sock"
        path.unlink(missing_ok=True)
        self.reader = self._start([sys.executable, "-m", "perseus_reader", f"--socket={path}"])
        wait_for(path.exists, "the reader listens")
        return path

    @property
    def _ready(self) -> Path:
        return self.folder / "run" / "ready"

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "agent.log").open("ab") as log:
            started = subprocess.Popen(command, stderr=log, cwd=_REPOSITORY, start_new_session=True)
        self._children.append(started)
        return started

    @property
    def agent_pid(self) -> int:
        """Of the agent that was started last."""
        assert self.agent
        return self.agent.pid

    def kill_agent(self) -> None:
        """With SIGKILL; its keeper gives back what was locked."""
        assert self.agent
        self.agent.kill()
        self.agent.wait(PATIENCE_S)

    def kill_keeper(self) -> None:
        """With SIGKILL."""
        assert self.keeper
        self.keeper.kill()
        self.keeper.wait(PATIENCE_S)

    def kill_reader(self) -> None:
        """With SIGKILL."""
        assert self.reader
        self.reader.kill()
        self.reader.wait(PATIENCE_S)

    def kill_trainers(self) -> None:
        """All, with SIGKILL, and crowds too."""
        for child in self._children:
            if child not in (self.agent, self.keeper, self.reader):
                child.kill()
                child.wait()

    def kill_agent_and_keeper(self) -> None:
        """As when the node kills the whole pod: nobody is left to give anything back."""
        self.kill_keeper()
        self.kill_agent()

    @property
    def socket(self) -> str:
        """Where trainers connect."""
        return str(self.folder / "run" / "agent.sock")

    @contextmanager
    def stub(self) -> Iterator[stubs.AgentStub]:
        """An operator's connection."""
        with grpc.insecure_channel(self.addresses["grpc"]) as channel:
            yield stubs.AgentStub(channel)

    def log(self) -> str:
        """The log of this node's agents and keepers."""
        return (self.folder / "agent.log").read_text()

    # ------------------------------------------------------------------------------------------- pods and trainers

    def add_pod(self, number: int, gpus: Sequence[int]) -> messages.Pod:
        """A pod that holds GPUs."""
        pod = messages.Pod(uid=pod_uid(number), namespace="training", name=f"pod-{number}")
        self.kubelet.admit(AdmittedPod(pod.uid, pod.namespace, pod.name, tuple(map(gpu_uuid, gpus))))
        return pod

    def start_trainer(
        self,
        pod: messages.Pod,
        *,
        dp: int = 0,
        stage: int = 0,
        instructions: int = 4,
        instruction_s: float = 0.005,
        iterations: int = 1_000_000,
        gpu: str = "",
        check_every: int = 0,
    ) -> subprocess.Popen[bytes]:
        """A training process in a pod, which tests its GPU between every so many iterations; 0: never."""
        arguments = {
            "socket": self.socket,
            "dp": dp,
            "stage": stage,
            "instructions": instructions,
            "instruction_s": instruction_s,
            "iterations": iterations,
            "gpu": gpu,
            "check_every": check_every,
        }
        command = [sys.executable, "-m", "tests.doubles.recording_trainer", json.dumps(arguments)]
        trainer = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=_REPOSITORY, start_new_session=True)
        self._children.append(trainer)
        self.kubelet.place([trainer.pid], pod.uid)
        assert trainer.stdin
        trainer.stdin.write(b"go\n")
        trainer.stdin.flush()
        return trainer

    def start_engine(self, pod: messages.Pod, *, step_s: float = 0.02, **more: Any) -> RunningEngine:
        """A serving engine in a pod, which has no requests yet. ``more``: of ``recording_engine``."""
        command = [sys.executable, "-m", "tests.doubles.recording_engine"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=_REPOSITORY, start_new_session=True)
        self._children.append(process)
        self.kubelet.place([process.pid], pod.uid)
        engine = RunningEngine(process)
        engine.says(socket=self.socket, step_s=step_s, **more)
        return engine

    def start_crowd(self, pod: messages.Pod) -> subprocess.Popen[bytes]:
        """A process in a pod that connects to the agent, sends noise and leaves, as fast as it can."""
        crowd = subprocess.Popen(
            [sys.executable, "-c", _CROWD, self.socket], stdin=subprocess.PIPE, start_new_session=True
        )
        self._children.append(crowd)
        self.kubelet.place([crowd.pid], pod.uid)
        assert crowd.stdin
        crowd.stdin.write(b"go\n")
        crowd.stdin.flush()
        return crowd

    # ------------------------------------------------------------------------------------------- GPUs

    def locked(self) -> dict[str, int | None]:
        """What every GPU is locked to."""
        return {gpu_uuid(gpu): recording_gpu.read_lock(self.folder / "gpu", gpu_uuid(gpu)) for gpu in range(self.gpus)}

    def calls(self) -> list[recording_gpu.Call]:
        """Every write to a GPU so far."""
        return recording_gpu.read_calls(self.folder / "gpu")

    def all_default(self) -> bool:
        """Whether no GPU is locked."""
        return not any(self.locked().values())


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until the condition holds.

    Raises:
        AssertionError: it does not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not in {timeout_s:g} s: {what}")
        time.sleep(0.005)

"""A model that vLLM serves on a node with a real agent and GPUs that record, and what the agent says of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.recording_node import JOB, RecordingNode, wait_for
from tests.vllm.conftest import Vllm
from tests.vllm.server import Ask, VllmServer

from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_reader.pages import PageReading, read_page

FLOOR = 900
_TABLE = messages.ClockTable(
    running=[64], kv_share_ppm=[1_000_000], clocks_mhz=[FLOOR], ladder_mhz=[FLOOR], boost_mhz=[0]
)
LAST = Ask(5, 4)
"""Its steps end a window that is long enough."""


@dataclass
class Watched:
    """A served model on a node: what it was asked for, and what the agent said of it."""

    server: VllmServer
    node: RecordingNode
    engines: list[messages.Engine] = field(default_factory=list)
    windows: list[messages.EngineWindow] = field(default_factory=list)
    asked: list[Ask] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(
        cls, vllm: Vllm, folder: Path, node_folder: Path, flags: Sequence[str] = (), **environment: str
    ) -> Iterator[Watched]:
        """Start both, with a table whose clock is `FLOOR` at any load.

        Args:
            vllm: the version.
            folder: of the server.
            node_folder: of the node.
            flags: further ones of the server.
            environment: further variables of the server.
        """
        with RecordingNode.open(node_folder, gpus=1) as node:
            node.start_agent()
            pod = node.add_pod(0, [0])
            variables = {"PERSEUS_SOCKET": node.socket, "PYTHONPATH": vllm.path, **environment}
            opened = VllmServer.open(vllm.python, folder, flags=flags, **variables)
            with opened as server, node.stub() as stub:
                node.kubelet.place([server.process.pid], pod.uid)
                request = messages.AcquireLeaseRequest(
                    job_uid=JOB, job_name=f"ns/{JOB}", epoch=time.time_ns(), ttl_ms=600_000, pods=[pod]
                )
                orders = [messages.EngineOrder(pod_uid=pod.uid, follow_table=True)]
                limits = messages.ServingLimits(first_token_us=1_000_000, per_token_us=50_000, attainment_ppm=990_000)
                lease = stub.AcquireLease(request)
                stub.OrderEngines(
                    messages.OrderEnginesRequest(
                        job_uid=JOB, epoch=lease.epoch, table=_TABLE, limits=limits, orders=orders
                    )
                )
                made = cls(server, node)
                stream = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB))
                reader = threading.Thread(target=_read, args=(stream, made))
                reader.start()
                yield made
                stream.cancel()
                reader.join()

    def wait_ready(self) -> None:
        """Until it serves, and the agent knows it."""
        self.server.wait_ready()
        wait_for(lambda: self.engines, "the engine connects")

    def ask(self, *asks: Ask) -> None:
        self.server.ask(*asks)
        self.asked += asks

    def settle(self) -> None:
        """Until windows hold all that was asked for. One ends with a step, a second after the one before."""
        for _ in range(10):
            time.sleep(1.2)
            self.ask(LAST)
            time.sleep(1.0)
            if self.total("requests") == len(self.asked) and self.total("generated_tokens") == self.generated:
                return
        pytest.fail(f"windows with {self.total('requests')} of {len(self.asked)} requests: {self.windows}")

    @property
    def prompt(self) -> int:
        return sum(ask.prompt for ask in self.asked)

    @property
    def generated(self) -> int:
        return sum(ask.generated for ask in self.asked)

    def total(self, name: str) -> int:
        return sum(getattr(window, name) for window in self.windows)

    def times(self, name: str) -> int:
        return sum(sum(getattr(window, name).counts) for window in self.windows)

    def page(self) -> PageReading:
        return read_page(self.server.get("/metrics"))

    def clocks(self, since: int) -> list[int | None]:
        """What the GPU was set to, from the call with this number on; None: the default clocks."""
        return [call.mhz for call in self.node.calls()[since:]]


def _read(stream: Any, made: Watched) -> None:
    try:
        for batch in stream:
            assert not batch.dropped
            for event in batch.events:
                if event.HasField("engine_joined"):
                    made.engines.append(event.engine_joined)
                elif event.HasField("window"):
                    made.windows.append(event.window)
    except Exception:
        if stream.code() is None or stream.code().name != "CANCELLED":
            raise

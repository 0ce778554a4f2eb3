"""An engine that lies about every number, beside one that does not: a real agent, real sessions, GPUs that record.

The liar gets the default clocks, or a clock that its load would have if it were true. Its neighbour in another pod
notices nothing: its clock follows its load, its prompts are boosted, and its windows count what it did.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.doubles.recording_node import JOB, RecordingNode, RunningEngine, gpu_uuid, wait_for
from tests.integration.test_engines import BUSY, FLOOR, HIGHER, TABLE, acquire, locked, order

from perseus_proto.engine_channel import EngineCounts
from perseus_proto.v1alpha1 import agent_pb2 as messages

pytestmark = pytest.mark.processes

NAMES = EngineCounts._fields
GROWING = [name for name in NAMES if name not in ("sequence", "waiting", "prefilling", "running", "kv_share_ppm")]
NAN = struct.unpack("<Q", struct.pack("<d", float("nan")))[0]
UNBELIEVED: dict[str, dict[str, Any]] = {
    "everything is as large as can be": {"counts": dict.fromkeys(NAMES, -1)},
    "fewer than no requests run": {"counts": {"running": -5}},
    "more requests wait than there can be": {"counts": {"waiting": 1 << 62, "prefilling": 1 << 62}},
    "a billion times its memory": {"counts": {"kv_share_ppm": 10**15}},
    "no number": {"counts": dict.fromkeys(NAMES[2:], NAN)},
    "time runs backwards": {"counts": {"time_us": "falls"}},
    "all counts fall": {"counts": dict.fromkeys(GROWING, "falls")},
    "nothing ever happens": {"counts": dict.fromkeys(NAMES, 0)},
}
"""What no engine can say: default clocks."""
BELIEVED: dict[str, dict[str, Any]] = {
    "idle while it is busy": {"counts": {"waiting": 0, "prefilling": 0, "running": 0, "kv_share_ppm": 0}},
    "every request is late": {"counts": {}, "missed": 50},
    "the bell rings without an end": {"counts": {}, "rings": 2_000},
}
"""What an engine could say: a clock of its own."""


@dataclass
class Neighbours:
    """Two pods of one job."""

    node: RecordingNode
    stub: Any
    liar: RunningEngine
    honest: RunningEngine

    def liar_mhz(self) -> int | None:
        (mhz,) = locked(self.node, [0])
        return mhz

    def honest_mhz(self) -> int | None:
        (mhz,) = locked(self.node, [1])
        return mhz

    def honest_is_served(self) -> None:
        """Its clock follows its load, to the highest and back."""
        for load, mhz in (({"running": 40}, HIGHER), ({"running": 40, "waiting": 1}, None), (BUSY, FLOOR)):
            self.honest.says(**load)
            wait_for(lambda mhz=mhz: self.honest_mhz() == mhz, f"the neighbour's clock at {load}")
            assert self.liar_mhz() in {None, *TABLE.ladder_mhz}


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbours]:
    with RecordingNode.open(tmp_path_factory.mktemp("node"), gpus=2) as node:
        node.start_agent()
        with node.stub() as stub:
            pods = [node.add_pod(number, [number]) for number in range(2)]
            order(stub, acquire(stub, *pods, ttl_ms=600_000), *pods)
            engines = [node.start_engine(pod) for pod in pods]
            yield Neighbours(node, stub, *engines)


@pytest.fixture(autouse=True)
def _both_follow(neighbours: Neighbours) -> None:
    for engine in (neighbours.liar, neighbours.honest):
        engine.says(**BUSY)
    wait_for(lambda: neighbours.honest_mhz() == FLOOR, "the honest one follows")
    wait_for(lambda: neighbours.liar_mhz() in TABLE.ladder_mhz, "who lies no more is believed again")


@pytest.mark.parametrize("lie", UNBELIEVED)
def test_what_cannot_be_true_costs_the_liar_its_clock_and_its_neighbour_nothing(
    neighbours: Neighbours, lie: str
) -> None:
    neighbours.liar.says(**BUSY, lie=UNBELIEVED[lie])
    wait_for(lambda: neighbours.liar_mhz() is None, "default clocks")
    neighbours.honest_is_served()


@pytest.mark.parametrize("lie", BELIEVED)
def test_what_could_be_true_moves_the_liars_clock_alone(neighbours: Neighbours, lie: str) -> None:
    neighbours.liar.says(waiting=3, lie=BELIEVED[lie], **BUSY)
    neighbours.honest_is_served()


def test_windows_of_the_neighbour_count_what_it_did(neighbours: Neighbours) -> None:
    everything = dict.fromkeys(NAMES[1:], "falls")
    neighbours.liar.says(**BUSY, lie={"counts": everything, "missed": 50, "rings": 200})
    described = neighbours.stub.DescribeNode(messages.DescribeNodeRequest()).engines
    pids = {engine.pid: list(engine.gpu_uuids) for engine in described}
    assert pids == {neighbours.liar.process.pid: [gpu_uuid(0)], neighbours.honest.process.pid: [gpu_uuid(1)]}
    stream = neighbours.stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB))
    windows: list[messages.EngineWindow] = []
    while len(windows) < 3:
        events = [event.window for event in next(stream).events if event.HasField("window")]
        windows += [window for window in events if window.pid == neighbours.honest.process.pid]
    stream.cancel()
    for window in windows[1:]:
        assert (window.running_milli, window.generated_tokens) == (8_000, 8 * window.steps)
        assert window.has_energy
        assert not window.first_tokens.counts

"""With a real GPU: CUDA events time a pipeline without a synchronisation of ours. Reads only; no clock is changed."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader, IterationRecord

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.gpu


class AgentEnd:
    """Takes one rank and keeps what it says."""

    def __init__(self, path: Path) -> None:
        self.hello: wire.Hello | None = None
        self.records: list[IterationRecord] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        connection, _ = self._listener.accept()
        self.hello = wire.receive_hello(connection, 10)
        reader = ChannelReader.create(len(self.hello.schedule))
        wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)
        gone = False
        while not gone:
            ready = select.select([connection, reader.event_fd], [], [])[0]
            gone = connection in ready
            reader.acknowledge()
            while (record := reader.drain_iteration()) is not None:
                self.records.append(record)


@pytest.fixture
def gpu(python: Path) -> None:
    probe = [str(python), "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(probe, check=False).returncode:
        pytest.skip("no GPU that torch can use")


@pytest.mark.usefixtures("gpu")
def test_instructions_are_timed_on_the_gpu_without_waiting_for_it(python: Path, tmp_path: Path) -> None:
    agent = AgentEnd(tmp_path / "agent.sock")
    result = tmp_path / "result.json"
    subprocess.run(
        [str(python), str(HERE / "gpu_worker.py"), str(result)],
        env=os.environ | {"PERSEUS_SOCKET": str(tmp_path / "agent.sock")},
        timeout=200,
        check=True,
    )
    agent.thread.join(10)
    said = json.loads(result.read_text())
    assert agent.hello is not None
    assert agent.hello.timing is wire.Timing.GPU
    assert agent.hello.gpu_hint == said["uuid"]
    assert said["synchronised"] == 0
    complete = [record for record in agent.records if record.complete]
    assert len(complete) >= 10
    for record in complete[1:]:
        assert record.end_us > record.begin_us
        assert 0 < sum(record.durations_us) <= 1.05 * (record.end_us - record.begin_us)

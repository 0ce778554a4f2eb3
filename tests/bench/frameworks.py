"""The client's share of a step of real PyTorch pipeline training; needs the environment of ``make test-frameworks``.

Two ranks train in separate processes. For each, another process acts as the agent and is woken before every
instruction. The value is the CPU time of the training thread inside the client, as a share of a step. The peer is the
same loop without the client, measured in turn; the median difference is smaller than the noise unless the machine is
idle.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from perseus_agent.process import use_batch_scheduling
from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("PERSEUS_FRAMEWORKS_PYTHON", ROOT / ".venv-frameworks" / "bin" / "python"))
WORKER = ROOT / "tests" / "frameworks" / "overhead_worker.py"
RANKS = 2


def follow(path: str) -> None:
    """The agent's end of one rank, until it hangs up: rung before every instruction, and foreseeing none."""
    use_batch_scheduling()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
        with connection:
            hello = wire.receive_hello(connection, 10)
            reader = ChannelReader.create(len(hello.schedule))
            reader.set_wake_map(b"\x01" * len(hello.schedule))
            wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)
            while connection not in select.select([connection, reader.event_fd], [], [])[0]:
                reader.acknowledge()
                reader.position()
                while reader.drain_iteration() is not None:
                    pass


def step_overhead() -> dict[str, Any]:
    """Measure the slowest rank."""
    if not PYTHON.exists():
        print(f"no training frameworks at {PYTHON}: install them with make test-frameworks", file=sys.stderr)
        return {"value": None, "unit": "%", "peer": None, "peer_value": None, "ratio": None}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        agents = [
            multiprocessing.Process(target=follow, args=(f"{folder}/{rank}.sock",), daemon=True)
            for rank in range(RANKS)
        ]
        for agent in agents:
            agent.start()
        world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                [str(PYTHON), str(WORKER), f"{folder}/result"],
                env=os.environ | world | {"RANK": str(rank), "PERSEUS_SOCKET": f"{folder}/{rank}.sock"},
            )
            for rank in range(RANKS)
        ]
        try:
            for rank in ranks:
                if rank.wait(300):
                    raise RuntimeError(f"a training process ended with code {rank.returncode}")
        finally:
            for rank in ranks:
                rank.kill()
            for agent in agents:
                agent.kill()
        found = [json.loads(Path(f"{folder}/result.{rank}").read_text()) for rank in range(RANKS)]
    worst = max(found, key=lambda one: float(one["inside_percent"]))
    print(f"step of {worst['step_ms']:.0f} ms with {worst['instructions']} instructions", file=sys.stderr)
    return {
        "value": worst["inside_percent"],
        "unit": "%",
        "peer": "difference to steps without the client, %",
        "peer_value": worst["difference_percent"],
        "ratio": None,
    }


FIGURES = {"framework_step_overhead_percent": step_overhead}

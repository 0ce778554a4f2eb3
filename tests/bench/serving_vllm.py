"""What vLLM's plugin costs a real vLLM, on CPU (``make vllm``): time of a step, and throughput with and without it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.doubles.recording_node import RecordingNode, wait_for
from tests.vllm.conftest import vllm_python
from tests.vllm.server import Ask, VllmServer

from perseus_proto.v1alpha1 import agent_pb2 as messages

Result = dict[str, Any]
ROUNDS: Final = 40
AT_ONCE: Final = 8
ROUND: Final = [Ask(16, 96)] * 24
TIMED: Final = Path(__file__).parents[1] / "vllm" / "timed_server.py"


def plugin() -> Result:
    """Two engines, one with the plugin and an agent that reads it, take turns; both are there all the time."""
    python = vllm_python()
    if python is None:
        print("no vLLM in .venv-vllm: make vllm installs it", file=sys.stderr)
        return {"value": None, "unit": "us"}
    with tempfile.TemporaryDirectory() as made, RecordingNode.open(Path(made) / "node", gpus=1) as node:
        folder, times = Path(made), Path(made) / "times"
        node.start_agent()
        pod = node.add_pod(0, [0])
        with (
            VllmServer.open(python, folder / "without", VLLM_PLUGINS="") as without,
            VllmServer.open(
                python, folder / "with", [str(TIMED)], PERSEUS_SOCKET=node.socket, PLUGIN_TIMES=str(times)
            ) as with_plugin,
        ):
            node.kubelet.place([with_plugin.process.pid], pod.uid)
            for server in (without, with_plugin):
                server.wait_ready()
                server.ask(*ROUND[:AT_ONCE])
            with node.stub() as stub:
                wait_for(lambda: stub.DescribeNode(messages.DescribeNodeRequest()).engines, "the engine connects")
            warm = times.stat().st_size
            shares = [_share(without, with_plugin, first=number % 2) for number in range(ROUNDS)]
            steps_us = np.frombuffer(times.read_bytes()[warm:], dtype="<u8") / 1000
    return {
        "serving_plugin_in_vllm_us_p50": {"value": float(np.quantile(steps_us, 0.5)), "unit": "us"},
        "serving_plugin_in_vllm_us_p99": {"value": float(np.quantile(steps_us, 0.99)), "unit": "us"},
        **_throughput([math.log(time_share) for time_share, _ in shares], "serving_plugin_throughput_percent"),
        **_throughput([math.log(cpu_share) for _, cpu_share in shares], "serving_plugin_cpu_percent"),
    }


def _share(without: VllmServer, with_plugin: VllmServer, first: int) -> tuple[float, float]:
    """Throughput with the plugin over that without, of a round each; and the same per second of the processor."""
    took = [_round(server) for server in ((without, with_plugin) if first else (with_plugin, without))]
    (plain_s, plain_cpu_s), (plugin_s, plugin_cpu_s) = took if first else reversed(took)
    return plain_s / plugin_s, plain_cpu_s / plugin_cpu_s


def _round(server: VllmServer) -> tuple[float, float]:
    """Seconds, and those of the processor in all of the server's processes."""
    begun_s, begun_cpu_s = time.monotonic(), _cpu_s(server.process.pid)
    asyncio.run(server.load(ROUND, AT_ONCE))
    return time.monotonic() - begun_s, _cpu_s(server.process.pid) - begun_cpu_s


def _cpu_s(group: int) -> float:
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _throughput(logs: list[float], name: str) -> Result:
    """The mean of ratios, with the ends of its 95 % interval."""
    mean, half = statistics.fmean(logs), 2.02 * statistics.stdev(logs) / math.sqrt(len(logs))
    values = {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return {key: {"value": 100 * math.exp(value), "unit": "%"} for key, value in values.items()}


FIGURES: Final = {"serving_vllm": plugin}

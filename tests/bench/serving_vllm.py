"""What vLLM's plugin costs a real vLLM, on CPU (``make vllm``): time of a step, and throughput with and without it.

One engine under a constant load has the plugin in every other block of steps: two engines, or one before and after,
differ by more than the plugin costs.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tests.doubles.recording_node import RecordingNode, wait_for
from tests.vllm.conftest import vllm_python
from tests.vllm.server import Ask, VllmServer
from tests.vllm.timed_server import BLOCK

from perseus_proto.v1alpha1 import agent_pb2 as messages

Result = dict[str, Any]
AT_ONCE: Final = 8
REQUESTS: Final = [Ask(16, 960)] * AT_ONCE
ROUNDS: Final = 104
"""A hundred thousand steps: the interval is then half a percent wide or less."""
SERVER: Final = Path(__file__).parents[1] / "vllm" / "timed_server.py"


def plugin() -> Result:
    """An engine with the plugin and an agent that reads it."""
    python = vllm_python()
    if python is None:
        print("no vLLM in .venv-vllm: make vllm installs it", file=sys.stderr)
        return {"value": None, "unit": "us"}
    with tempfile.TemporaryDirectory() as made, RecordingNode.open(Path(made) / "node", gpus=1) as node:
        times = Path(made) / "times"
        node.start_agent()
        pod = node.add_pod(0, [0])
        environment = {"PERSEUS_SOCKET": node.socket, "PLUGIN_TIMES": str(times)}
        with VllmServer.open(python, Path(made) / "vllm", [str(SERVER)], **environment) as server:
            node.kubelet.place([server.process.pid], pod.uid)
            server.wait_ready()
            asyncio.run(server.load(REQUESTS, AT_ONCE))
            with node.stub() as stub:
                wait_for(lambda: stub.DescribeNode(messages.DescribeNodeRequest()).engines, "the engine connects")
            warm = times.stat().st_size // 16
            asyncio.run(server.load(REQUESTS * ROUNDS, AT_ONCE))
            steps = np.fromfile(times, dtype="<u8").reshape(-1, 2)
    steps = steps[-(-warm // (2 * BLOCK)) * 2 * BLOCK :]  # from the begin of a pair
    took_us = steps[steps[:, 1] > 0, 1] / 1000
    mean, half = _throughput(steps)
    return {
        "serving_plugin_in_vllm_us_p50": {"value": float(np.quantile(took_us, 0.5)), "unit": "us"},
        "serving_plugin_in_vllm_us_p99": {"value": float(np.quantile(took_us, 0.99)), "unit": "us"},
        "serving_plugin_throughput_percent": {"value": 100 * math.exp(mean), "unit": "%"},
        "serving_plugin_throughput_percent_low": {"value": 100 * math.exp(mean - half), "unit": "%"},
        "serving_plugin_throughput_percent_high": {"value": 100 * math.exp(mean + half), "unit": "%"},
    }


def _throughput(steps: NDArray[np.uint64]) -> tuple[float, float]:
    """Throughput with the plugin over that without, as a logarithm: mean of the pairs of blocks, and half of its 95 %
    interval.

    Args:
        steps: [(when the plugin was called, its processor's time)] ns, from the begin of a pair.
    """
    pairs = (len(steps) - 1) // (2 * BLOCK)
    steps_ns = np.diff(steps[: pairs * 2 * BLOCK + 1, 0].astype(np.int64))  # the plugin's work lies after the call
    log_times = np.log(steps_ns.reshape(pairs, 2, BLOCK).sum(axis=2))
    first = steps[: pairs * 2 * BLOCK : 2 * BLOCK, 1] > 0
    logs = np.where(first, log_times[:, 1] - log_times[:, 0], log_times[:, 0] - log_times[:, 1])
    return float(logs.mean()), 1.96 * float(logs.std(ddof=1)) / math.sqrt(pairs)


FIGURES: Final = {"serving_vllm": plugin}

"""Converts what agents say about their GPUs: model, driver, power limit and switch latency."""

from __future__ import annotations

from typing import Final

from perseus_core.units import w_from_mw
from perseus_operator.nodes.gpu import MAX_BOARD_W, Gpu
from perseus_proto.latency import decode_latency
from perseus_proto.power_policy import decode_policy
from perseus_proto.v1alpha1 import agent_pb2

_MAX_NAME: Final = 256
"""Characters of a model or driver: the name becomes part of a status."""


def gpu_of(message: agent_pb2.Gpu, driver: str) -> Gpu:
    """Return a GPU's model, driver and switch latency; a latency that cannot be true is none."""
    limit_w = w_from_mw(message.max_power_mw)
    max_power_w = limit_w if 0 < limit_w <= MAX_BOARD_W else None
    latency = decode_latency(message.clock_latency) if message.HasField("clock_latency") else None
    policy = decode_policy(message.power_policy) if message.HasField("power_policy") else None
    return Gpu(message.model[:_MAX_NAME], driver[:_MAX_NAME], latency, max_power_w, policy)

"""What a GPU's driver holds it to, as a message: the agent writes it, the operator reads it and bounds it."""

from __future__ import annotations

import re
from typing import Final

from perseus_core.power_policy import PowerPolicy
from perseus_proto.v1alpha1 import agent_pb2

MAX_PROFILES: Final = 32
_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
_MAX_W: Final = 100_000


def encode_policy(policy: PowerPolicy) -> agent_pb2.PowerPolicy:
    """Return the message of a policy."""
    return agent_pb2.PowerPolicy(
        requested_profiles=policy.requested,
        enforced_profiles=policy.enforced,
        floor_w=policy.floor_w,
        secondary_floor_w=policy.secondary_floor_w,
    )


def decode_policy(message: agent_pb2.PowerPolicy) -> PowerPolicy:
    """Return the policy of a message; names and watts that cannot be true are left out."""
    return PowerPolicy(
        _profiles(message.requested_profiles),
        _profiles(message.enforced_profiles),
        min(message.floor_w, _MAX_W),
        min(message.secondary_floor_w, _MAX_W),
    )


def _profiles(names: object) -> tuple[str, ...]:
    return tuple(sorted({name for name in list(names)[:MAX_PROFILES] if _NAME.fullmatch(name)}))  # type: ignore[call-overload]

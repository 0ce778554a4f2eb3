"""What makes two replicas the same: models that were fitted to one may be used for the other.

As for a PerseusProfile, which is used for jobs of the same GPU model, driver and shape, all of it must be equal;
nothing is near enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perseus_solver.errors import InvalidProblem

MOST_FLAGS: Final = 256
_LONGEST: Final = 1_024
_NO_MATTER: Final = frozenset(
    """
    api-key host port root-path served-model-name uvicorn-log-level log-level disable-log-requests disable-log-stats
    ssl-keyfile ssl-certfile ssl-ca-certs allowed-origins allowed-methods allowed-headers api-server-port http-port
    grpc-port metrics-port nccl-port dist-init-addr hostname otlp-traces-endpoint download-dir hf-token
    """.split()  # noqa: SIM905
)
"""Flags of vLLM, SGLang, TGI and TensorRT-LLM that change no step, and some that nobody else may read."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the time and the watts of a step depend on.

    Attributes:
        model: name and revision of the weights.
        engine: its name.
        engine_version: in full.
        gpu_model: as the driver names it.
        driver_version: of the GPU.
        parallelism: how layers and sequences are split, in words: ``tp 4, pp 1``.
        flags: that change a step, as name and value, in order of their names.

    Raises:
        InvalidProblem: a value is empty or too long.
    """

    model: str
    engine: str
    engine_version: str
    gpu_model: str
    driver_version: str
    parallelism: str
    flags: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "engine", "engine_version", "gpu_model", "driver_version", "parallelism"):
            value = getattr(self, name)
            if not 0 < len(value) <= _LONGEST or "\n" in value:
                raise InvalidProblem(f"{name} must have 1 to {_LONGEST} characters, in one line")
        if list(self.flags) != sorted(set(self.flags)):
            raise InvalidProblem("flags must be in order, each once")

    @property
    def digest(self) -> str:
        """SHA-256 over all of it; the leading word changes with the models."""
        parts = ("perseus.serving.1", self.model, self.engine, self.engine_version, self.gpu_model, self.driver_version,
                 self.parallelism, *(f"{name}={value}" for name, value in self.flags))  # fmt: skip
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def step_flags(arguments: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return those of an engine's arguments that change a step, as `Fingerprint.flags` has them.

    Args:
        arguments: of its command line, without the program: ``--name value``, ``--name=value``, ``--name``, or
            with one dash. What follows no flag is passed over: it names the model.

    Raises:
        InvalidProblem: too many, or one that is too long.

    >>> step_flags(["serve", "m", "--port", "80", "--max_num_seqs=64", "--enforce-eager"])
    (('enforce-eager', ''), ('max-num-seqs', '64'))
    """
    if len(arguments) > 2 * MOST_FLAGS or any(len(argument) > _LONGEST for argument in arguments):
        raise InvalidProblem(f"arguments must be at most {2 * MOST_FLAGS}, each of at most {_LONGEST} characters")
    flags: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("-") and not argument[1:2].isdigit():
            name, _, value = argument.lstrip("-").partition("=")
            name = name.replace("_", "-")
            flags[name] = value.replace("\n", " ")
            name = "" if value else name
        elif name:
            flags[name] = f"{flags[name]} {argument}".strip().replace("\n", " ")
    return tuple(sorted((name, value) for name, value in flags.items() if name and name not in _NO_MATTER))

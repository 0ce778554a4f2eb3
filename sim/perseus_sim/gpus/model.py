"""Simulated GPU models: the figures of ``perseus_proto.gpus`` with the behaviour of a driver, and profiles of made-up
models computed from them. Used to write the samples of the project and by tests; trainers read the resulting CSV.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_proto.gpus import FILES, GpuCurves, read_figures
from perseus_proto.latency import published_latency
from perseus_sim.gpus.switching import DriverModel

BACKWARD_RATIO = 1.85
"""Backward to forward time of a transformer layer with activation recomputation, as in the published profiles."""


@dataclass(frozen=True)
class GpuModel(GpuCurves):
    """One kind of GPU, and how its driver behaves."""

    driver: DriverModel

    @classmethod
    def read(cls, path: Path) -> GpuModel:
        """Read a file of figures.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not one.
        """
        figures = read_figures(path)
        found: dict[str, Any] = tomllib.loads(path.read_text())["driver"]
        latency = published_latency(figures["name"])
        sources = {key: one["source"] for key, one in found.items()}
        figures["sources"] |= {**sources, "latency": latency.source}
        figures["name"] += " (simulated)"
        return cls(driver=DriverModel(latency=latency, **{key: one["value"] for key, one in found.items()}), **figures)


MODELS = {path.stem: GpuModel.read(path) for path in FILES}
"""By the names of ``--gpu-model``."""
GPU_MODELS = tuple(MODELS)


def stage_weights(stages: int, imbalance: float) -> tuple[float, ...]:
    """Relative work of each stage: equal layers, and the language-model head on top of the last one's.

    Raises:
        ValueError: no stage, or a last stage lighter than the others.
    """
    if stages < 1:
        raise ValueError(f"stages: must be at least 1, is {stages}")
    if imbalance < 1:
        raise ValueError(f"imbalance: longest over shortest stage, must be at least 1, is {imbalance}")
    return (*(1.0,) * (stages - 1), imbalance if stages > 1 else 1.0)


def profile_csv(
    stages: int = 4,
    gpu: str = "a100",
    imbalance: float = 1.12,
    forward_s: float = 0.036,
) -> str:
    """A profile as the field writes it: ``stage,instruction,frequency,time,energy`` (MHz, s, J).

    Args:
        stages: pipeline stages.
        gpu: a key of ``MODELS``.
        imbalance: time of the longest stage over that of the others. Published for GPT-3 on 4 stages: 1.02 (175B) to
            1.17 (1B).
        forward_s: forward time of an ordinary stage at the highest clock.

    Returns:
        The CSV, as ``perseus_solver.read_profile`` reads it.

    Raises:
        ValueError: an argument breaks its rule.

    >>> profile_csv(stages=2).splitlines()[:2]
    ['stage,instruction,frequency,time,energy', '0,forward,1410,0.036000,16.9488']
    """
    if not forward_s > 0:
        raise ValueError(f"forward_s: must be more than 0, is {forward_s}")
    kinds = (("forward", 1.0), ("backward", BACKWARD_RATIO))
    weights = enumerate(stage_weights(stages, imbalance))
    return _csv(gpu, [(stage, kind, forward_s * weight * ratio) for stage, weight in weights for kind, ratio in kinds])


def steps_csv(gpu: str = "a100", step_s: float = 0.4) -> str:
    """A profile of a job without a pipeline: its only instruction is ``step``.

    Args:
        gpu: a key of ``MODELS``.
        step_s: time of an iteration at the highest clock.

    Returns:
        The CSV, as ``perseus_solver.read_profile`` reads it.

    Raises:
        ValueError: an argument breaks its rule.
    """
    if not step_s > 0:
        raise ValueError(f"step_s: must be more than 0, is {step_s}")
    return _csv(gpu, [(0, "step", step_s)])


def _csv(gpu: str, instructions: Iterable[tuple[int, str, float]]) -> str:
    """The rows of instructions at every clock worth measuring: stage, kind, and seconds at the highest clock."""
    if gpu not in MODELS:
        raise ValueError(f"gpu: must be one of {', '.join(MODELS)}, is {gpu!r}")
    model = MODELS[gpu]
    clocks = [clock for clock in reversed(model.clocks_mhz) if clock >= model.lowest_profiled_mhz]
    lines = ["stage,instruction,frequency,time,energy"]
    for stage, kind, fastest_s in instructions:
        for clock in clocks:
            time_s = fastest_s * model.slowdown(clock)
            lines.append(f"{stage},{kind},{clock},{time_s:.6f},{time_s * model.power_w(clock):.4f}")
    return "\n".join(lines) + "\n"

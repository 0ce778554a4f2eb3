"""Profiles of made-up models, computed from the figures of simulated GPUs. Used to write the samples of the project and
by tests; trainers read the resulting CSV.
"""

from __future__ import annotations

from perseus_core.instruction import InstructionKind
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_solver.model.assumed import WORK, assumed_profile


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
    weights = enumerate(stage_weights(stages, imbalance))
    kinds = (InstructionKind.FORWARD, InstructionKind.BACKWARD)
    times_s = {(stage, kind, 0): forward_s * weight * WORK[kind] for stage, weight in weights for kind in kinds}
    return assumed_profile(_model(gpu), times_s)


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
    return assumed_profile(_model(gpu), {(0, InstructionKind.STEP, 0): step_s})


def _model(gpu: str) -> GpuModel:
    if gpu not in MODELS:
        raise ValueError(f"gpu: must be one of {', '.join(MODELS)}, is {gpu!r}")
    return MODELS[gpu]

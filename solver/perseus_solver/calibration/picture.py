"""The picture of a calibration: predicted against measured times of iterations, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from perseus_solver.calibration.estimate import chosen_iterations, predict_s, replay_s
from perseus_solver.calibration.model import Calibration
from perseus_solver.calibration.trace import Trace
from perseus_solver.drawing import BLUE, GREEN, MUTED, ORANGE, figure_of, png_of
from perseus_solver.kinds import Floats


def calibration_png(trace: Trace, calibration: Calibration, train_fraction: float) -> bytes:
    """Draw predicted against measured time of every iteration, and the error of each, plan by plan.

    Args:
        trace: the measured iterations.
        calibration: predicts them.
        train_fraction: as given to `calibrate`, to distinguish fitted iterations.
    """
    figure, (left, right) = _side_by_side(width=9.0, height=4.0)
    measured_s = trace.iteration_time_s
    fitted = chosen_iterations(trace, train_fraction)
    every = np.ones_like(fitted)
    series: list[tuple[str, Floats, Any, str, str]] = [("graph alone", replay_s(trace), every, ORANGE, "x")]
    if calibration.explains:
        predicted_s = predict_s(calibration, trace)
        series += [
            ("calibrated, held out", predicted_s, ~fitted, BLUE, "o"),
            ("calibrated, fitted", predicted_s, fitted, GREEN, "+"),
        ]
    # In the order of the legend; what comes first is drawn below the others.
    ends = [float(f(np.append(measured_s, series[0][1]))) for f in (np.min, np.max)]
    left.plot(ends, ends, "-", color=MUTED, lw=0.8, label="measured = predicted")
    plan = np.unique(trace.plan, return_inverse=True)[1]
    for label, predicted, chosen, colour, marker in series:
        error = 100 * (predicted / measured_s - 1)
        mean = float(np.abs(error[chosen]).mean())
        style: Any = {"ls": "", "marker": marker, "color": colour, "ms": 4, "mew": 0.9, "alpha": 0.8}
        left.plot(measured_s[chosen], predicted[chosen], **style, label=f"{label} (mean error {mean:.3g} %)")
        right.plot(plan[chosen], error[chosen], **style)
    right.axhline(0, color=MUTED, lw=0.8, zorder=0)
    left.set_title(f"{calibration.schedule}, {calibration.stages} stages, {calibration.microbatches} microbatches")
    left.set_xlabel("measured iteration time (s)")
    left.set_ylabel("predicted iteration time (s)")
    left.legend(fontsize=8)
    right.set_title(f"the model {calibration.status} this run")
    right.set_xlabel("plan, in the order run")
    right.set_ylabel("error of the prediction (%)")
    return png_of(figure)


def _side_by_side(*, width: float, height: float) -> tuple[Any, Any]:
    figure, _ = figure_of(width=width, height=height)
    figure.clear()
    return figure, figure.subplots(1, 2)

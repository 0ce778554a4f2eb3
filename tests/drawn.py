"""Pictures as the project's figures are before they become PNG: what is written in them, and where marks are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perseus_solver.drawing import stated


@contextmanager
def drawn_figures() -> Iterator[list[Figure]]:
    """Collect what is drawn meanwhile."""
    captured: list[Figure] = []
    save = Figure.savefig

    def capture(figure: Figure, *arguments: Any, **options: Any) -> None:
        captured.append(figure)
        save(figure, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", capture)
        yield captured


def texts(axes: Axes) -> list[str]:
    """Everything that is written in a panel, one line each."""
    panel: Any = SimpleNamespace(axes=[axes])
    return stated(panel)


def mark(axes: Axes, name: str) -> tuple[float, float]:
    """Where a mark of the legend is: seconds, joules."""
    handles, labels = axes.get_legend_handles_labels()
    handle: Any = handles[labels.index(name)]
    line = handle.lines[0] if hasattr(handle, "lines") else handle
    (x,), (y,) = line.get_xdata(), line.get_ydata()
    return float(x), float(y)


def boxes(axes: Axes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Begin and end of each instruction that is drawn."""
    corners = np.array([path.vertices[:4, 0] for path in axes.collections[0].get_paths()])
    return corners.min(axis=1), corners.max(axis=1)


def numbers(text: str) -> list[float]:
    """The numbers of a text, with their signs, in order."""
    found = re.findall(r"[-+−]?\d[\d,]*\.?\d*(?:e-?\d+)?", text)
    return [float(one.replace(",", "").replace("−", "-")) for one in found]

"""How our figures look: colours, style, and PNG bytes that say what is written in them.

With `plots` and the `picture` modules the only ones of the product that import matplotlib. Colours can be distinguished
in print and by colour-blind readers.
"""

from __future__ import annotations

import io
from typing import Any

INK, MUTED = "#22262a", "#7a828a"
BLUE, ORANGE, GREEN, PURPLE = "#0b62a4", "#d9600a", "#1b8a5a", "#7b4fa3"
_STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 200,
}
DESCRIPTION = "Description"
"""Key of the PNG text in which a picture states what is written in it."""


def stated(figure: Any) -> list[str]:
    """Return what is written in a figure but for its axes, one line each: titles, labels of marks, the legend. Each
    picture carries it as `DESCRIPTION`, so that it can be read and checked.
    """
    lines: list[str] = []
    for axes in figure.axes:
        legend = axes.get_legend()
        in_legend = [] if legend is None else [legend.get_title(), *legend.get_texts()]
        titles = [axes.get_title(where) for where in ("left", "center", "right")]
        lines += [*titles, *(text.get_text() for text in (*axes.texts, *in_legend))]
    return [" ".join(line.split()) for line in lines if line.strip()]


def figure_of(*, width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes, one above the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update(_STYLE)
    return plt.subplots(rows, 1, figsize=(width, height), sharex=True, layout="constrained")


def png_of(figure: Any) -> bytes:
    """A figure as PNG bytes, which carry what is stated in it."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={DESCRIPTION: "\n".join(stated(figure))})
    plt.close(figure)
    return buffer.getvalue()


def signed_percent(share: float, digits: int = 1) -> str:
    """Return a change as pictures have it: −0.092 as ``−9.2 %``, and never a negative zero.

    >>> signed_percent(0.0123), signed_percent(-0.0001)
    ('+1.2 %', '0.0 %')
    """
    text = f"{100 * share:+.{digits}f} %"
    return text.replace("-", "−") if float(text[:-2]) else text[1:]

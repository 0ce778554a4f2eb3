"""How an operator grows with its fleet, as a picture: CPU and memory over nodes, from the figures of `make bench`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any, Final

Result = dict[str, Any]
PICTURE: Final = "images/benchmarks-fleet.png"
_SIZE: Final = re.compile(r"(?P<nodes>\d+)nodes_2s$")
_LINES: Final = (
    ("fleet_cpu_percent_", "fleet_rss_mib_", "over gRPC and TLS, fleets of several shapes", "#0b62a4", "o"),
    ("fleet_wire_cpu_percent_", "fleet_wire_rss_mib_", "on the wire", "#d9600a", "-o"),
)


def points(figures: Result, prefix: str) -> list[tuple[int, float]]:
    """Return (nodes, value) of the figures with a prefix, at iterations of two seconds."""

    def found() -> Iterator[tuple[int, float]]:
        for name, figure in figures.items():
            size = _SIZE.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if size and figure["value"] is not None:
                yield int(size["nodes"]), figure["value"]

    return sorted(found())


def picture(figures: Result) -> bytes:
    """Return a PNG; nothing without figures of at least three fleets on the wire."""
    if len(points(figures, _LINES[1][0])) < 3:
        return b""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawing, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for cpu, rss, label, colour, style in _LINES:
        for axes, prefix in ((left, cpu), (right, rss)):
            if known := points(figures, prefix):
                axes.plot(*zip(*known, strict=True), style, color=colour, ms=4, label=label, clip_on=False)
    left.set(xlabel="nodes of eight GPUs", ylabel="CPU (% of a core)", xlim=(0, None), ylim=(0, None))
    right.set(xlabel="nodes of eight GPUs", ylabel="memory (MiB)", xlim=(0, None), ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    plt.close(drawing)
    return buffer.getvalue()

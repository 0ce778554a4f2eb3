"""What the demo of serving leaves behind: a page with its log and figures, the same as JSON, and one picture.

All of it is a function of `ServingResults`: nothing is measured or looked up here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perseus_sim.cluster.live_engines import Ended
from perseus_solver.drawing import BLUE, GREEN, MUTED, ORANGE, PURPLE, figure_of, png_of, signed_percent

FILES: Final = ("serving.md", "serving.json", "serving.png")
_COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE)


@dataclass(frozen=True)
class LoadSpan:
    """A while of the demo; times by the machine's monotonic clock.

    Attributes:
        begin_s, end_s: when.
        joules: of all GPUs, by their counters; 0: not measured.
        tokens: that the engines generated; 0: not counted.
        ended: requests that came within it.
    """

    begin_s: float
    end_s: float
    joules: float
    tokens: int
    ended: tuple[Ended, ...]

    @property
    def joules_per_token(self) -> float:
        """Energy of all GPUs over the tokens of all engines."""
        return self.joules / self.tokens


@dataclass(frozen=True)
class ServingResults:
    """What was observed.

    Attributes:
        gpu: what the simulated GPUs are.
        highest_mhz: of their clocks.
        limits_s: of the first token, and between tokens.
        began_s: when the demo began; monotonic, like all times here.
        before: one period of the load at default clocks.
        law: the same requests under the law.
        burst: requests that came at once to one replica.
        silence_s: how long after an engine hung its GPU was at its default clocks.
        clocks: by replica: when its clock changed, and to how many MHz; 0: the default clocks.
        watts: when, and what all GPUs drew lately.
        ended: all requests.
    """

    gpu: str
    highest_mhz: int
    limits_s: tuple[float, float]
    began_s: float
    before: LoadSpan
    law: LoadSpan
    burst: LoadSpan
    silence_s: float
    clocks: Mapping[str, Sequence[tuple[float, int]]]
    watts: Sequence[tuple[float, float]]
    ended: Sequence[Ended]

    @property
    def saved(self) -> float:
        """Share of the energy of a token."""
        return 1 - self.law.joules_per_token / self.before.joules_per_token

    def kept(self, ended: Sequence[Ended]) -> int:
        """How many of these requests kept both limits."""
        first_s, token_s = self.limits_s
        return sum(one.first_token_s <= first_s and one.per_token_s <= token_s for one in ended)


def write_serving_report(results: ServingResults, folder: Path, story: Sequence[str]) -> list[Path]:
    """Write `FILES`; returns their paths.

    Args:
        results: what was observed.
        folder: where to; made if it is not there.
        story: what the console said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = (
        _page(results, story).encode(),
        (json.dumps(serving_document(results), indent=2) + "\n").encode(),
        serving_png(results),
    )
    for name, content in zip(FILES, contents, strict=True):
        (folder / name).write_bytes(content)
    return [folder / name for name in FILES]


def serving_document(results: ServingResults) -> dict[str, Any]:
    """Return every figure of the page."""
    return {
        "gpu": results.gpu,
        "first_token_limit_s": results.limits_s[0],
        "per_token_limit_s": results.limits_s[1],
        "default_clocks": _span(results, results.before),
        "law": _span(results, results.law),
        "saved": results.saved,
        "burst": {"requests": len(results.burst.ended), "kept": results.kept(results.burst.ended)},
        "default_clocks_after_silence_s": results.silence_s,
        "requests": len(results.ended),
        "kept": results.kept(results.ended),
    }


def serving_png(results: ServingResults) -> bytes:
    """Draw clocks, watts and requests over time.

    Returns:
        PNG bytes.
    """
    figure, (top, middle, bottom) = figure_of(width=9.0, height=7.0, rows=3)
    began_s = results.began_s
    end_s = max((at_s for at_s, _ in results.watts), default=began_s)
    for number, (colour, (pod, changes)) in enumerate(zip(_COLOURS, results.clocks.items(), strict=False)):
        times = [at_s - began_s for at_s, _ in changes]
        clocks = [mhz or results.highest_mhz for _, mhz in changes]
        top.step(
            [*times, end_s - began_s],
            [*clocks, *clocks[-1:]],
            where="post",
            color=colour,
            lw=2.4 - 0.8 * number,
            label=pod,
        )
    top.set_ylabel("clock, MHz")
    top.set_title("Clocks of the replicas; at the top: default clocks")
    top.legend(loc="lower left", ncols=len(results.clocks))
    middle.plot([at_s - began_s for at_s, _ in results.watts], [w for _, w in results.watts], color=BLUE)
    middle.set_ylim(bottom=0)
    middle.set_ylabel("all GPUs, W")
    middle.set_title(f"Power: {signed_percent(-results.saved)} energy a token, for the same requests")
    first_s, _ = results.limits_s
    bottom.scatter(
        [one.arrival_s - began_s for one in results.ended],
        [1000 * one.first_token_s for one in results.ended],
        s=4, color=GREEN, linewidths=0,
    )  # fmt: skip
    bottom.axhline(1000 * first_s, color=ORANGE, lw=1)
    late = len(results.ended) - results.kept(results.ended)
    bottom.set_title(f"Requests: {late} of {len(results.ended)} missed a limit; the line is that of the first token")
    bottom.set_ylabel("first token, ms")
    bottom.set_xlabel("seconds of the demo")
    spans = (("default clocks", results.before), ("the law", results.law), ("a burst", results.burst))
    for axes in (top, middle, bottom):
        for name, span in spans:
            axes.axvspan(span.begin_s - began_s, span.end_s - began_s, color=MUTED, alpha=0.12, lw=0)
            if axes is middle:
                at_s = (span.begin_s + span.end_s) / 2 - began_s
                axes.annotate(name, (at_s, 0.04), xycoords=("data", "axes fraction"), ha="center", color=MUTED)
    return png_of(figure)


def _span(results: ServingResults, span: LoadSpan) -> dict[str, Any]:
    return {
        "seconds": span.end_s - span.begin_s,
        "joules": span.joules,
        "tokens": span.tokens,
        "joules_per_token": span.joules_per_token,
        "requests": len(span.ended),
        "kept": results.kept(span.ended),
    }


def _page(results: ServingResults, story: Sequence[str]) -> str:
    rows = [
        f"| {name} | {len(span.ended)} | {results.kept(span.ended)} | {span.joules_per_token:.2f} | "
        f"{span.joules / (span.end_s - span.begin_s):.0f} |"
        for name, span in (("default clocks", results.before), ("the law", results.law))
    ]
    lines = [
        "# Clocks that follow the load",
        "",
        f"Simulated {results.gpu}s, real time. The same requests at default clocks and under the law: "
        f"**{signed_percent(-results.saved)} energy a token**.",
        "",
        "| | requests | kept both limits | J a token | W |",
        "|---|--:|--:|--:|--:|",
        *rows,
        "",
        f"Of a burst of {len(results.burst.ended)} requests {results.kept(results.burst.ended)} kept both limits. "
        f"{1000 * results.silence_s:.0f} ms after an engine hung, its GPU was at its default clocks.",
        "",
        "![clocks, power and requests](serving.png)",
        "",
        "```",
        *story,
        "```",
        "",
    ]
    return "\n".join(lines)

"""Writes what a page says into an engine's memory, as the engine with the plugin would itself.

A page has no steps: their mean time is that of the gaps between tokens, and how many there were follows from the tokens
and the requests that ran. Steps that computed prompts look like others there, so an interval in which
prompts were computed counts tokens and times of requests, and no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perseus_core.lengths import UNKNOWN, length_place
from perseus_core.serving import MOST_SHARES
from perseus_core.units import us_from_s
from perseus_proto.engine_channel import EngineWriter
from perseus_reader.pages import PageReading

_MOST_STEPS: Final = 2_000
"""Between two pages: engines make at most a thousand steps a second."""
_LEAST_STEP_S, _MOST_STEP_S = 1e-4, 60.0


class PageWriter:
    """One page's way into the memory.

    Args:
        writer: of the memory.
    """

    def __init__(self, writer: EngineWriter) -> None:
        self._writer = writer
        self._before: PageReading | None = None

    def write(self, page: PageReading) -> None:
        """Take in the page as it is now. The first one, and the first after a restart of the engine, says the load
        alone.
        """
        before, self._before = self._before, page
        restarted = before is not None and (
            page.first_tokens.count < before.first_tokens.count or page.generated_tokens < before.generated_tokens
        )
        if before is None or restarted:
            self._write(page)
            return
        first = _between(before.first_tokens.places(), page.first_tokens.places())
        ended = _between(before.tokens.places(), page.tokens.places())
        prompts = _between(before.prompts.lengths(), page.prompts.lengths())
        outputs = _between(before.outputs.lengths(), page.outputs.lengths())
        lengths = [length_place(one, UNKNOWN) for one in prompts] + [length_place(UNKNOWN, one) for one in outputs]
        self._writer.count_times(first, ended, lengths)
        prompt_tokens = max(0, page.prompt_tokens - before.prompt_tokens)
        generated = max(0, page.generated_tokens - before.generated_tokens)
        preempted = max(0, page.preempted - before.preempted)
        if not prompt_tokens and not first:
            self._write_steps(before, page)
        self._write(
            page, prompt_tokens=prompt_tokens, generated_tokens=generated, preempted=preempted, requests=len(ended)
        )

    def _write_steps(self, before: PageReading, page: PageReading) -> None:
        gaps, seconds = page.gaps.count - before.gaps.count, page.gaps.total - before.gaps.total
        running = (before.running + page.running) / 2
        if gaps < 1 or running < 1 or not _LEAST_STEP_S <= seconds / gaps <= _MOST_STEP_S:
            return
        for _ in range(min(_MOST_STEPS, round(gaps / running))):
            self._write(page, step_us=us_from_s(seconds / gaps))

    def _write(
        self,
        page: PageReading,
        *,
        step_us: int | None = None,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        preempted: int = 0,
        requests: int = 0,
    ) -> None:
        self._writer.step(
            page.waiting,
            0,
            page.running,
            round(1e6 * page.kv_share),
            step_us=step_us,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            preempted=preempted,
            requests=requests,
        )


def _between(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """The places at which requests were counted between two pages, each as often as it was; at most `MOST_SHARES`."""
    places = list[int]()
    for place, count in after.items():
        more = count - before.get(place, 0)
        places += [place] * max(0, min(more, MOST_SHARES - len(places)))
    return places

"""The dashboards as people see them: each panel drawn from what a real Prometheus answers, in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from tests.dashboards import BOARDS, panels
from tests.observability.conftest import VALUES, Browser, Prometheus, await_true

from documentation_pictures.dashboard import WIDTH_PX, Sample, page

_POINTS = 240


class Answers:
    """What one Prometheus answers."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus

    def ask(self, expression: str, span_s: tuple[float, float] | None) -> Sequence[Sample]:
        if span_s is None:
            found = self._prometheus.get("/api/v1/query", query=expression)["result"]
            return _samples((series["metric"], [series["value"]]) for series in found)
        begin_s, end_s = span_s
        asked = {"start": str(begin_s), "end": str(end_s), "step": str((end_s - begin_s) / _POINTS)}
        found = self._prometheus.get("/api/v1/query_range", query=expression, **asked)["result"]
        return _samples((series["metric"], series["values"]) for series in found)


def _samples(found: Iterable[tuple[dict[str, str], Sequence[tuple[float, str]]]]) -> list[Sample]:
    """Return the series of which a number is left: NaN is no answer."""
    numbers = [
        Sample(labels, [(at_s, float(value)) for at_s, value in values if value not in {"NaN", "+Inf", "-Inf"}])
        for labels, values in found
    ]
    return [sample for sample in numbers if sample.points]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_shows_data_in_every_panel(
    path: Path, prometheus: Prometheus, browser: Browser, tmp_path: Path
) -> None:
    board = json.loads(path.read_text())
    values = {**VALUES, "$__range": f"{time.time() - prometheus.since_s:.0f}s"}
    drawn = tmp_path / "page.html"

    def without_data() -> list[str]:
        drawn.write_text(page(board, values, Answers(prometheus), (prometheus.since_s, time.time())))
        browser.driver.get(drawn.as_uri())
        return [each.text for each in browser.driver.find_elements(By.CSS_SELECTOR, "section:has(.none) h3")]

    # A scrape that fails on a machine that stalls leaves a figure empty for a moment.
    await_true(f"every panel of {path.stem} has data", lambda: not without_data())
    shown = [each.text for each in browser.driver.find_elements(By.CSS_SELECTOR, "h2, h3")]
    assert shown == [panel["title"] for panel in panels(board)]
    graphs = [panel for panel in panels(board) if panel["type"] in {"timeseries", "xychart"}]
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "svg #axes_1")) == len(graphs)
    assert browser.complaints() == []
    browser.picture(f"dashboard-{board['uid'].removeprefix('perseus-')}", (WIDTH_PX, 0))

"""The series of a node that serves: how its engines speak, what holds their clocks, how soon a boost is there.

Other nodes have none of them. Their number does not depend on the number of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from perseus_agent.node.node import Node
from perseus_agent.servers.series import QUANTILES, Sample, Series
from perseus_core.serving import ClockReason
from perseus_core.units import s_from_us

_NODE: Final = ("node",)
PAGES: Final = ("read", "failed")
"""Values of the label ``page``."""

ENGINE_SERIES: Final = (
    Series("perseus_agent_engines", "gauge", "Serving engines that drive GPUs.", _NODE),
    Series(
        "perseus_agent_engine_seconds_total",
        "counter",
        "Time of the engines by what held their clock; its rate is how many engines it held.",
        (*_NODE, "limited_by"),
    ),
    Series("perseus_agent_engine_samples_total", "counter", "Samples of engines that were believed.", _NODE),
    Series(
        "perseus_agent_engine_samples_refused_total",
        "counter",
        "Samples of engines that cannot be true; until the next one the clocks are the default ones.",
        _NODE,
    ),
    Series(
        "perseus_agent_boosts_total",
        "counter",
        "Clocks raised for prompts that wait or requests beyond the table, on all GPUs of an engine.",
        _NODE,
    ),
    Series(
        "perseus_agent_boost_seconds",
        "gauge",
        "From an engine's word to the raised clock in effect, p50 and p99 of the latest boosts.",
        (*_NODE, "quantile"),
    ),
    Series(
        "perseus_agent_metrics_pages",
        "gauge",
        "Metrics pages of engines that do not say by themselves what they do: read, or failed.",
        (*_NODE, "page"),
    ),
)
"""What an agent exposes once it has met an engine, or is asked to read a page."""


def engine_samples(node: Node) -> Iterator[Sample]:
    """Every series of a node's engines; none where there was none."""
    totals, failed = node.engine_totals, len(node.page_faults)
    driving = sum(bool(engine.gpu_uuids) for engine in node.engines())
    held_us = totals.held_us
    if not (driving or failed or held_us):
        return
    yield "perseus_agent_engines", (), driving
    for reason in ClockReason:
        yield "perseus_agent_engine_seconds_total", (reason.value,), s_from_us(held_us.get(reason.value, 0))
    yield "perseus_agent_engine_samples_total", (), totals.samples
    yield "perseus_agent_engine_samples_refused_total", (), totals.refused
    yield "perseus_agent_boosts_total", (), totals.boosts
    for quantile in QUANTILES:
        boost_us = totals.boost_us(float(quantile))
        if boost_us is not None:
            yield "perseus_agent_boost_seconds", (quantile,), s_from_us(boost_us)
    for page, pages in zip(PAGES, (totals.pages_read, failed), strict=True):
        yield "perseus_agent_metrics_pages", (page,), pages

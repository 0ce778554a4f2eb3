"""One family of series, as an agent exposes it and as the metrics page describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

Sample = tuple[str, tuple[str, ...], float]
"""Name of the family, its labels after the node's, value."""


@dataclass(frozen=True)
class Series:
    """One family of series, as it is exposed and as the metrics page describes it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]

    def family(self) -> Any:
        """An empty family; ``add_metric(labels, value)`` fills it."""
        family, suffix = _FAMILIES[self.kind]
        return family(self.name.removesuffix(suffix), self.help, labels=self.labels)


_FAMILIES: Final[dict[str, tuple[Any, str]]] = {
    "gauge": (GaugeMetricFamily, ""),
    "counter": (CounterMetricFamily, "_total"),
    "info": (InfoMetricFamily, "_info"),
}
"""With the suffix that the library adds to the name by itself."""
QUANTILES: Final = ("0.5", "0.99")
"""Values of the label of that name."""

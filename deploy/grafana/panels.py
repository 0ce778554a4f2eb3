"""The few kinds of panel that the dashboards are made of; a dashboard is a list of rows of them.

Every query is of Prometheus and of the datasource variable; no namespace, job or node is written into one. What adds up
over a fleet comes from the recording rules, and of what a fleet has thousands of, ``most`` shows a few: no panel draws
more in a larger fleet. From a job or a node in a panel, a link leads to its own dashboard.
"""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, text, timeseries, xychart
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH: Final = 24
_HIGH, _LOW = 8, 4

SHOWN: Final = 10
"""Curves of one query where there may be thousands."""
LISTED: Final = 20
"""Rows of a table."""

Query = tuple[str, str]
"""Expression and legend."""
Link = tuple[str, str]
"""Title and address."""


def to_job(namespace: str, name: str) -> Link:
    """To the dashboard of a job, whose namespace and name Grafana finds by these expressions."""
    return "This job", _address("perseus-job", job_namespace=namespace, job_name=name)


def to_node(name: str) -> Link:
    """To the dashboard of a node, whose name Grafana finds by this expression."""
    return "This node", _address("perseus-node", node=name)


def _address(uid: str, **variables: str) -> str:
    chosen = "".join(f"&var-{name}=${{{value}}}" for name, value in variables.items())
    return f"/d/{uid}?${{datasource:queryparam}}{chosen}&${{__url_time_range}}"


TO_JOB: Final = to_job("__field.labels.job_namespace", "__field.labels.job_name")
TO_NODE: Final = to_node("__field.labels.node")
"""From a curve that has these labels."""


def most(expression: str, by: str, *, number: int = SHOWN, least: bool = False) -> str:
    """The series of an expression that come highest within the time range, over all of it, also those that have ended.

    ``topk`` alone chooses anew at each moment, and so draws any number of curves in all.

    Args:
        expression: with one series for each that is chosen from.
        by: the labels that tell its series apart.
        number: of series.
        least: those that come lowest instead.
    """
    return f"{expression} and on ({by}) {extremes(expression, number=number, least=least)}"


def extremes(expression: str, *, number: int = SHOWN, least: bool = False) -> str:
    """So many series that come highest within the time range, or lowest: the same at each moment."""
    choose, extreme = ("bottomk", "min") if least else ("topk", "max")
    return f"{choose}({number}, {extreme}_over_time(({expression})[$__range:$__interval] @ end()))"


def line(title: str, unit: str, what: str, *queries: Query, stacked: bool = False, link: Link | None = None) -> Any:
    """Curves over time; ``link``: from each."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(what)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(_HIGH)
        .fill_opacity(20 if stacked else 5)
        .show_points(VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for number, (expression, legend) in enumerate(queries):
        panel.with_target(_query(number, expression).range().legend_format(legend))
    return panel.data_links([_link(link)]) if link else panel


def figure(title: str, unit: str, what: str, expression: str, *, bad_from: float | None = None) -> Any:
    """One number; red from ``bad_from`` on."""
    steps = [model.Threshold(value=None, color="text" if bad_from is None else "green")]
    if bad_from is not None:
        steps.append(model.Threshold(value=bad_from, color="red"))
    return (
        stat.Panel()
        .title(title)
        .description(what)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(_LOW)
        .thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_query(0, expression).instant())
    )


def note(title: str, words: str) -> Any:
    """Words in Markdown."""
    return text.Panel().title(title).content(words).height(_LOW)


def listing(
    title: str,
    what: str,
    key: str,
    columns: dict[str, tuple[str, str]],
    *,
    parts: tuple[str, ...] = (),
    link: Link | None = None,
) -> Any:
    """A table of instant queries joined by one label.

    Args:
        title, what: of the panel.
        key: the label.
        columns: each with its unit and expression.
        parts: what the slashes in the label separate, hidden, for the link to name.
        link: from each value of the label.
    """
    panel = table.Panel().title(title).description(what).datasource(DATASOURCE).height(_HIGH)
    for number, (_, expression) in enumerate(columns.values()):
        panel.with_target(_query(number, expression).instant().format(PromQueryFormat.TABLE))
    panel.with_transformation(_join(key))
    names = {f"Value #{_ref(number)}": name for number, name in enumerate(columns)}
    if parts:
        panel.with_transformation(_split(key, parts))
    panel.with_transformation(_rename(names))
    for part in parts:
        panel.override_by_name(part, [model.DynamicConfigValue(id_val="custom.hidden", value=True)])
    for name, (unit, _) in columns.items():
        panel.override_by_name(name, [model.DynamicConfigValue(id_val="unit", value=unit)])
    if link:
        panel.override_by_name(key, [model.DynamicConfigValue(id_val="links", value=[_link(link).build()])])
    return panel


def curve(title: str, what: str, *, key: str, x: Query, ys: list[Query], units: tuple[str, str]) -> Any:
    """Points in the plane: instant queries joined by a label, the first gives x; a legend names each."""
    panel = (
        xychart.Panel()
        .title(title)
        .description(what)
        .datasource(DATASOURCE)
        .height(2 * _HIGH)
        .point_size(xychart.XychartFieldConfigPointSize().fixed(8))
    )
    for number, (expression, _) in enumerate([x, *ys]):
        panel.with_target(_query(number, expression).instant().format(PromQueryFormat.TABLE))
    panel.with_transformation(_join(key))
    panel.with_transformation(_rename({f"Value #{_ref(n)}": legend for n, (_, legend) in enumerate([x, *ys])}))
    panel.override_by_name(x[1], [model.DynamicConfigValue(id_val="unit", value=units[0])])
    for _, legend in ys:
        panel.override_by_name(legend, [model.DynamicConfigValue(id_val="unit", value=units[1])])
    return panel


def board(uid: str, title: str, what: str, variables: list[Any], rows: list[tuple[str, list[Any]]]) -> str:
    """A dashboard as JSON; the panels of a row share its width."""
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(what)
        .tags(["perseus"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Perseus")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["perseus"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in variables:
        built.with_variable(variable)
    for name, panels in rows:
        built.with_row(dashboard.Row(name))
        for panel in panels:
            built.with_panel(panel.span(_WIDTH // len(panels)))
    return str(JSONEncoder(sort_keys=True, indent=1).encode(built.build())) + "\n"


def label_variable(name: str, label: str, query: str, *, every: bool = False) -> Any:
    """A drop-down of a label's values; ``every``: with All."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    return variable.include_all(True).multi(True).all_value(".*") if every else variable


def job_variables() -> list[Any]:
    """Drop-downs that choose one job."""
    return [
        label_variable("job_namespace", "Namespace", "label_values(perseus_job_ready, job_namespace)"),
        label_variable(
            "job_name", "PerseusJob", 'label_values(perseus_job_ready{job_namespace="$job_namespace"}, job_name)'
        ),
    ]


def _ref(number: int) -> str:
    return chr(ord("A") + number)


def _query(number: int, expression: str) -> Any:
    return prometheus.Dataquery().expr(expression).ref_id(_ref(number)).datasource(DATASOURCE)


def _join(key: str) -> model.DataTransformerConfig:
    return model.DataTransformerConfig(id_val="joinByField", options={"byField": key, "mode": "outer"})


def _split(key: str, parts: tuple[str, ...]) -> model.DataTransformerConfig:
    pattern = "/".join(f"(?<{part}>[^/]+)" for part in parts).replace("/", r"\/")
    options = {"source": key, "format": "regexp", "regExp": f"/^{pattern}$/", "keepTime": False, "replace": False}
    return model.DataTransformerConfig(id_val="extractFields", options=options)


def _link(link: Link) -> Any:
    title, address = link
    return dashboard.DashboardLink(title).url(address)


def _rename(names: dict[str, str]) -> model.DataTransformerConfig:
    hidden = {name: True for number in range(10) for name in ("Time", f"Time {number + 1}")}
    return model.DataTransformerConfig(
        id_val="organize", options={"excludeByName": hidden, "renameByName": names, "indexByName": {}}
    )

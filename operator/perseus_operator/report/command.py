"""The arguments of a report, and the way from them to its text: of ``kubectl perseus report`` and of
``perseus report``.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from perseus_operator.errors import UnusableArgument
from perseus_operator.report import annex_xi, electricity_maps, focus, rows_csv, spdx, stored, table
from perseus_operator.report.factors import OPTIONS, ZONE, HourlyValues, constant_factor, file_values, hourly_factor
from perseus_operator.report.figures import GROUPS, LABEL
from perseus_operator.report.merged import Source, merge
from perseus_operator.report.prometheus import ENV_TOKEN, Access, Prometheus
from perseus_operator.report.statement import (
    FACTORS,
    LOCATION,
    MAX_DAYS,
    PRICE,
    Factor,
    Period,
    Statement,
)
from perseus_operator.report.usage import Query, read_usage
from perseus_runtime.addresses import parse_url

SINCE: Final = re.compile(r"([1-9][0-9]{0,4})([mhdw])")
FORMATS: Final[Mapping[str, Callable[[Statement, str, str], str]]] = {
    "table": table.write,
    "csv": rows_csv.write,
    "json": lambda statement, by, _: stored.write(statement, by),
    "spdx": spdx.write,
    "focus": focus.write,
    "annex-xi": annex_xi.write,
}
_LENGTH: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MONTH: Final = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")
_LABEL_KEY: Final = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_TOKENS: Final = re.compile(r"(?P<path>[a-z0-9.-]+/[a-z0-9.-]+)=(?P<tokens>[0-9.]+(e[+]?[0-9]+)?)")
_DEFAULT_SINCE: Final = "30d"
_MAX_FILES: Final = 1000
"""More than the days, or the quarters of a day, of a year are no report's parts."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which jobs and pools a report is of.

    Attributes:
        namespace: None: all.
        labels: reads a label of namespaces, by its key: their values by name; None: there is no cluster to ask.
    """

    namespace: str | None
    labels: Callable[[str], Mapping[str, Mapping[str, str]]] | None = None


def add_arguments(parser: Any) -> None:
    """Add the arguments that both commands have."""
    parser.add_argument("--format", choices=tuple(FORMATS), default="table", help="of the report; default: table")
    parser.add_argument(
        "--by", type=_group, metavar="GROUP", help=f"{', '.join(GROUPS)} or {LABEL}KEY of namespaces; default: job"
    )
    parser.add_argument("--since", type=_since, metavar="30d", help="how far back; default: 30d")
    parser.add_argument("--month", type=_month, metavar="2026-10", help="a calendar month (UTC) instead")
    parser.add_argument(
        "--from",
        dest="stored",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="read a report of --format json, no Prometheus; of several, such as days, one whose periods adjoin",
    )
    for name, option in OPTIONS.items():
        zone = f", or {ZONE}DE" if name == LOCATION else ""
        parser.add_argument(
            option, metavar="VALUE:SOURCE", help=f"{FACTORS[name][0]}; or a CSV with the columns hour and value{zone}"
        )
    parser.add_argument(
        "--carbon-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key of Electricity Maps; default: the key in {electricity_maps.ENV_KEY}",
    )
    parser.add_argument("--currency", type=_currency, metavar="EUR", help="of the price (ISO 4217)")
    parser.add_argument("--organization", type=_organization, metavar="NAME", help="whose report it is")
    parser.add_argument(
        "--tokens-per-step",
        type=_tokens,
        action="append",
        metavar="NAMESPACE/JOB=N",
        help="tokens that a step of a job trains on; may be given for several",
    )
    _add_prometheus(parser)


def _add_prometheus(parser: Any) -> None:
    parser.add_argument(
        "--prometheus",
        type=_url,
        default=os.environ.get("PERSEUS_PROMETHEUS", "http://localhost:9090"),
        metavar="URL",
        help="of the site; default: PERSEUS_PROMETHEUS, or http://localhost:9090",
    )
    parser.add_argument(
        "--prometheus-user", metavar="NAME", help="whose password the token is; default: it is a bearer token"
    )
    for name, what in (
        ("token-file", f"holds the token that it wants; default: the token in {ENV_TOKEN}, if there is one"),
        ("ca", "authority (PEM) of its certificate; default: the system's"),
        ("cert", "certificate (PEM) that it wants from you; needs --prometheus-key"),
        ("key", "private key (PEM) of that certificate"),
    ):
        parser.add_argument(f"--prometheus-{name}", type=Path, metavar="FILE", help=what)


def report(options: argparse.Namespace, scope: Scope) -> tuple[Statement, str]:
    """Read a statement, from a Prometheus or a file, and apply the factors that were given.

    Args:
        options: as ``add_arguments`` has them parsed.
        scope: of a Prometheus's.

    Returns:
        The statement, and by what it is grouped.

    Raises:
        UnusableArgument: an argument, or a file that it names, cannot be used.
        CannotAnswer: a service does not answer.
    """
    if options.stored is not None:
        if options.since or options.month:
            raise UnusableArgument("--from: its period is that of the file; leave --since and --month out")
        statement, by = _stored(options)
        if by.startswith(LABEL) and not any(by.removeprefix(LABEL) in one.labels for one in statement.members):
            raise UnusableArgument(f"--by: the file has no label {by.removeprefix(LABEL)} of namespaces")
    else:
        by = options.by or "job"
        statement = _measure(options, scope, by, datetime.now(UTC))
    return _applied(options, statement), by


def text(statement: Statement, by: str, form: str) -> str:
    """Format a statement as one of ``FORMATS``.

    Raises:
        UnusableArgument: the format needs what the statement lacks.
    """
    return FORMATS[form](statement, by, stored.digest(statement))


def _stored(options: argparse.Namespace) -> tuple[Statement, str]:
    """A statement from its file, or one of several; grouped as the first of them is, unless it is said."""
    if len(options.stored) > _MAX_FILES:
        raise UnusableArgument(f"--from: at most {_MAX_FILES} files, not {len(options.stored)}")
    read = [stored.read(path) for path in options.stored]
    sources = [
        Source(name=path.name, digest=stored.digest(statement), statement=statement)
        for path, (statement, _) in zip(options.stored, read, strict=True)
    ]
    replaced = frozenset(name for name in OPTIONS if _given(options, name) is not None)
    return merge(sources, replaced), options.by or read[0][1]


def _measure(options: argparse.Namespace, scope: Scope, by: str, now: datetime) -> Statement:
    period = _period(options, now)
    labels: Mapping[str, Mapping[str, str]] = {}
    if by.startswith(LABEL):
        if scope.labels is None:
            raise UnusableArgument("--by: labels of namespaces are read by kubectl perseus report, or from its file")
        labels = scope.labels(by.removeprefix(LABEL))
    access = Access(
        options.prometheus_user,
        options.prometheus_token_file,
        options.prometheus_ca,
        options.prometheus_cert,
        options.prometheus_key,
    )
    query: Query = Prometheus(options.prometheus, access)
    usage = read_usage(query, period, scope.namespace, labels)
    return Statement(
        period=period,
        taken_s=int(now.timestamp()),
        scope="all namespaces" if scope.namespace is None else f"namespace {scope.namespace}",
        origin=options.prometheus,
        queries=usage.queries,
        program=f"perseus-k8s {_release()}",
        members=usage.members,
        measured_hours=usage.measured_hours,
    )


def _applied(options: argparse.Namespace, statement: Statement) -> Statement:
    """With the factors and declarations that were given, in place of those that it has."""
    factors = dict(statement.factors)
    for name in OPTIONS:
        given = _given(options, name)
        if given is not None:
            factors[name] = _factor(name, given, options.carbon_key_file, statement)
    currency = options.currency or statement.currency
    if PRICE in factors and not currency:
        raise UnusableArgument("--price: needs --currency, such as EUR")
    tokens = {**statement.tokens_per_step, **dict(options.tokens_per_step or ())}
    jobs = {member.path for member in statement.members if member.kind == "job"}
    if unknown := sorted(tokens.keys() - jobs):
        raise UnusableArgument(f"--tokens-per-step: nothing of a job {unknown[0]} was measured in this period")
    return replace(
        statement,
        factors={name: factors[name] for name in FACTORS if name in factors},
        currency=currency if PRICE in factors else "",
        organization=options.organization or statement.organization,
        tokens_per_step=dict(sorted(tokens.items())),
    )


def _given(options: argparse.Namespace, name: str) -> str | None:
    """What the option of a factor says; None: it is not given."""
    value: str | None = getattr(options, OPTIONS[name].removeprefix("--").replace("-", "_"))
    return value


def _factor(name: str, given: str, key_file: Path | None, statement: Statement) -> Factor:
    constant = constant_factor(name, given)
    if constant is not None:
        return constant
    values: HourlyValues
    if given.startswith(ZONE):
        if name != LOCATION:
            raise UnusableArgument(f"{OPTIONS[name]}: a zone is of the grid, and so for --carbon alone")
        values = electricity_maps.zone_values(given.removeprefix(ZONE), key_file)
    else:
        values = file_values(name, Path(given))
    return hourly_factor(name, values, statement.period, statement.members)


def _period(options: argparse.Namespace, now: datetime) -> Period:
    now_s = int(now.timestamp())
    if options.month is None:
        return Period(begin_s=now_s - (options.since or _since(_DEFAULT_SINCE)), end_s=now_s)
    if options.since:
        raise UnusableArgument("--month: not together with --since")
    begin: datetime = options.month
    if begin >= now:
        raise UnusableArgument(f"--month: {begin:%Y-%m} has not begun")
    following = (begin + timedelta(days=32)).replace(day=1)
    return Period(begin_s=int(begin.timestamp()), end_s=int(min(following, now).timestamp()))


def _release() -> str:
    try:
        return version("perseus-k8s")
    except PackageNotFoundError:  # as krew installs it
        return "of krew"


def _group(text: str) -> str:
    if text in GROUPS or (text.startswith(LABEL) and _LABEL_KEY.fullmatch(text.removeprefix(LABEL))):
        return text
    raise argparse.ArgumentTypeError(f"must be {', '.join(GROUPS)} or {LABEL}KEY, such as {LABEL}team; not {text!r}")


def _since(text: str) -> int:
    match = SINCE.fullmatch(text)
    length_s = int(match[1]) * _LENGTH[match[2]] if match else 0
    if not 0 < length_s <= MAX_DAYS * _LENGTH["d"]:
        raise argparse.ArgumentTypeError(f"must be a time such as 12h, 30d or 4w, up to {MAX_DAYS}d, not {text!r}")
    return length_s


def _month(text: str) -> datetime:
    match = _MONTH.fullmatch(text)
    if match is None or not 2000 <= int(match[1]) < 2200:
        raise argparse.ArgumentTypeError(f"must be a month such as 2026-10, not {text!r}")
    return datetime(int(match[1]), int(match[2]), 1, tzinfo=UTC)


def _currency(text: str) -> str:
    if not re.fullmatch(r"[A-Z]{3}", text):
        raise argparse.ArgumentTypeError(f"must be three capital letters such as EUR, not {text!r}")
    return text


def _organization(text: str) -> str:
    if not 0 < len(text.strip()) <= 200 or not text.isprintable():
        raise argparse.ArgumentTypeError("must be a name of up to 200 characters")
    return text.strip()


def _tokens(text: str) -> tuple[str, float]:
    match = _TOKENS.fullmatch(text)
    try:
        tokens = float(match["tokens"]) if match else 0.0
    except ValueError:
        tokens = 0.0
    if match is None or not 0 < tokens <= 1e12:
        raise argparse.ArgumentTypeError(f"must be such as team-a/gpt3=2097152, not {text!r}")
    return match["path"], tokens


def _url(text: str) -> str:
    try:
        parse_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; such as http://localhost:9090") from None
    return text

"""Serving: the load of a pool, the clocks that follow it, whether its limits are kept, and what that saves."""

from __future__ import annotations

from typing import Final

from grafana.panels import LISTED, board, figure, label_variable, line, listing

_THIS: Final = '{job_namespace="$pool_namespace", job_name="$pool_name"}'
_RATE: Final = "[$__rate_interval]"
_TIMES: Final = {"first_token": "first token", "output_token": "time per output token"}
_POOL: Final = "job_namespace, job_name"
_ITS_NODES: Final = f"and on (node) perseus_node_job_gpus{_THIS}"
JOULES: Final = "job:perseus_pool_token_joules:rate5m"
ATTAINED: Final = "job:perseus_pool_attainment_ratio:min"


def _of(metric: str, more: str = "") -> str:
    return f"max(perseus_pool_{metric}{_THIS[:-1]}{more}}})"


def _rate(counter: str) -> str:
    return f"sum(rate(perseus_pool_{counter}_total{_THIS}{_RATE}))"


def _by_node(metric: str) -> str:
    return f"max by (node) (perseus_node_job_{metric}{_THIS})"


def _time(name: str) -> str:
    return f', time="{name}"'


def _listed(expression: str) -> str:
    """One series for each pool, with its full name as the only label: a table's key."""
    chosen = f"topk({LISTED}, max by ({_POOL}) (rate(perseus_pool_generated_tokens_total[5m])))"
    of_these = f"max by ({_POOL}) ({expression}) and on ({_POOL}) {chosen}"
    return f'max by (servingpool) (label_join({of_these}, "servingpool", "/", "job_namespace", "job_name"))'


def serving() -> str:
    """The dashboard."""
    now = [
        figure("Ready", "bool", "Whether all that the pool's mode needs is there.", _of("ready")),
        figure("Replicas", "none", "Whose engine says what it does.", _of("pods", ', engine="seen"')),
        figure("Mean clock", "hertz", "Lately; the default clocks count as the highest.", _of("clock_hertz")),
        figure(
            "Limit kept", "percentunit", "By the latest requests: the lesser of both shares.", f"max({ATTAINED}{_THIS})"
        ),
        figure("Energy of a token", "joule", "In the last five minutes.", f"max({JOULES}{_THIS})"),
        figure("Energy saved", "percentunit", "Of a token, by switching back.", _of("saved_ratio")),
    ]
    load = [
        line(
            "Tokens",
            "cps",
            "A second, of all replicas. Of prompts those that were computed.",
            (_rate("generated_tokens"), "generated"),
            (_rate("prompt_tokens"), "of prompts"),
        ),
        line("Requests", "reqps", "That ended, a second.", (_rate("requests"), "requests")),
        line(
            "Requests that decode",
            "none",
            "Mean of all replicas together.",
            (_rate("running_request_seconds"), "decode"),
        ),
    ]
    clocks = [
        line(
            "Clock",
            "hertz",
            "Mean over the latest ten minutes or so; of the GPUs as read back now; what is tried at the canary; and the"
            " lowest of the table.",
            (f'max by (__name__) ({{__name__=~"perseus_pool_(.+_)?clock_hertz", {_THIS[1:]})', "{{__name__}}"),
            (
                f"sum({_by_node('clock_mean_hertz')} * {_by_node('gpus')}) / sum({_by_node('gpus')})",
                "read back",
            ),
        ),
        line(
            "Replicas by what holds their clock",
            "none",
            "Floor and Trim are the table's; Boost and Hold those of waiting prompts; Ordered is the operator's own;"
            " with any other word they run at default clocks.",
            (
                f"sum by (limited_by) (rate(perseus_pool_replica_seconds_total{_THIS}{_RATE})) > 0",
                "{{limited_by}}",
            ),
            stacked=True,
        ),
        line(
            "Boost",
            "s",
            "From an engine's word that it has more to do to the raised clock in effect: the slowest node of the pool.",
            *(
                (f'max(perseus_agent_boost_seconds{{quantile="{quantile}"}} {_ITS_NODES})', word)
                for quantile, word in (("0.99", "p99"), ("0.5", "median"))
            ),
        ),
    ]
    objective = [
        line(
            "Attainment",
            "percentunit",
            "Share of the latest requests that kept each limit, and the share that shall.",
            *((_of("attainment_ratio", _time(name)), words) for name, words in _TIMES.items()),
            (_of("attainment_wanted_ratio"), "wanted"),
        ),
        line(
            "Late requests",
            "percentunit",
            "Of those that ended since the scrape before, by the limit that they missed.",
            *(
                (
                    f"sum(rate(perseus_pool_late_requests_total{_THIS[:-1]}{_time(name)}}}{_RATE}))"
                    f" / sum(rate(perseus_pool_judged_requests_total{_THIS[:-1]}{_time(name)}}}{_RATE}))",
                    words,
                )
                for name, words in _TIMES.items()
            ),
        ),
        line(
            "Overloaded replicas",
            "none",
            "At which a limit is about to be missed at the highest clock: more of it does not help, more replicas do.",
            (_of("overloaded_replicas"), "overloaded"),
        ),
        line(
            "Pods by their engine",
            "none",
            "Those that say what they do; those that do not; those that are not known well enough; and those that"
            " differ from most. All but the first run at default clocks.",
            (f"max by (engine) (perseus_pool_pods{_THIS})", "{{engine}}"),
        ),
    ]
    energy = [
        line(
            "Energy of a token",
            "joule",
            "Of a generated one, all included.",
            (f"max({JOULES}{_THIS})", "a token"),
        ),
        line("GPU power", "watt", "Of all replicas, by their energy.", (_rate("energy_joules"), "power")),
        line(
            "Energy saved",
            "percentunit",
            "Of a token, against default clocks on the same replicas, with its 95 % interval.",
            (_of("saved_high_ratio"), "at most"),
            (_of("saved_ratio"), "saved"),
            (_of("saved_low_ratio"), "at least"),
        ),
    ]
    engines = [
        line(
            "Engines at default clocks",
            "none",
            "On the nodes of the pool, as agents see it: without a sample, with one that cannot be true, beyond the"
            " table, or short of memory.",
            (
                "sum by (limited_by) (rate(perseus_agent_engine_seconds_total"
                f'{{limited_by=~"NoSample|ImpossibleSample|BeyondTable|MemoryFull"}}{_RATE}) {_ITS_NODES})',
                "{{limited_by}}",
            ),
        ),
        line(
            "Samples",
            "cps",
            "That engines on these nodes gave, and those that could not be true.",
            *(
                (f"sum(rate(perseus_agent_engine_samples{which}_total{_RATE}) {_ITS_NODES})", words)
                for which, words in (("", "believed"), ("_refused", "refused"))
            ),
        ),
        line(
            "Engines and their pages",
            "none",
            "On these nodes: engines that drive GPUs, and metrics pages that are read or cannot be.",
            (f"sum(perseus_agent_engines {_ITS_NODES})", "engines"),
            (f"sum by (page) (perseus_agent_metrics_pages {_ITS_NODES})", "pages {{page}}"),
        ),
    ]
    pools = [
        listing(
            "Pools",
            f"The {LISTED} that generate most tokens.",
            "servingpool",
            {
                "ready": ("bool", _listed("perseus_pool_ready")),
                "replicas": ("none", _listed('perseus_pool_pods{engine="seen"}')),
                "mean clock": ("hertz", _listed("perseus_pool_clock_hertz")),
                "limit kept": ("percentunit", _listed(ATTAINED)),
                "energy of a token": ("joule", _listed(JOULES)),
                "energy saved": ("percentunit", _listed("perseus_pool_saved_ratio")),
            },
        )
    ]
    variables = [
        label_variable("pool_namespace", "Namespace", "label_values(perseus_pool_ready, job_namespace)"),
        label_variable(
            "pool_name", "ServingPool", 'label_values(perseus_pool_ready{job_namespace="$pool_namespace"}, job_name)'
        ),
    ]
    rows = [
        *(("Now", now), ("Load", load), ("Clocks", clocks), ("Objective", objective), ("Energy", energy)),
        *(("Engines", engines), ("All pools", pools)),
    ]
    return board("perseus-serving", "Perseus / Serving", "Load, clocks, limits and joules of a pool.", variables, rows)

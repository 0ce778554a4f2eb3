"""``kubectl perseus``: the commands, from arguments to one text or document; an error is one line on standard error.

Exit codes: 0 done; 1 refused: there is no such job or frontier, access is denied, or the request breaks a rule; 2 wrong
arguments; 3 the cluster cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import yaml

from perseus_core import keys
from perseus_operator.api.job import JobSpec, StragglerMode
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import (
    CannotAnswer,
    InvalidSpec,
    KubeError,
    KubeForbidden,
    KubeNotFound,
    KubeUnavailable,
)
from perseus_operator.families.training.features.stragglers.annotation import (
    Declaration,
    declare,
    duration_of_iterations_s,
    parse_annotation,
)
from perseus_operator.objects.values import Json
from perseus_operator.plugin.classes import class_of_namespace, refused_namespaces
from perseus_operator.plugin.doctor import examine
from perseus_operator.plugin.energy_report import GROUPS, SINCE, energy_report
from perseus_operator.plugin.job import NO_DEFINITION, load_job, read_job
from perseus_operator.plugin.kube_client import KubeReader
from perseus_operator.plugin.listing import listing
from perseus_operator.plugin.prometheus import ENV_TOKEN, Access, Prometheus
from perseus_operator.plugin.reports import explanation, frontier_document, plan_document
from perseus_operator.plugin.tables import (
    Terminal,
    diagnosis_text,
    energy_report_text,
    explanation_text,
    frontier_text,
    listing_text,
    plan_text,
)
from perseus_runtime.addresses import parse_url
from perseus_runtime.command_line import CommandParser
from perseus_runtime.direct import bypass_proxies

REFUSED, USAGE, UNREACHABLE = 1, 2, 3
_PROGRAM: Final = "kubectl perseus"
_DELAY = re.compile(r"(?P<number>\d{1,7}(?:\.\d{1,6})?)(?P<unit>s|it)")


def main() -> None:
    """Run ``kubectl-perseus`` with the process's arguments and exit with its code."""
    bypass_proxies()
    sys.exit(run(sys.argv[1:], sys.stdout, sys.stderr))


def run(arguments: Sequence[str], out: TextIO, err: TextIO) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; none: the help is shown.
        out: receives the answer, as the text or document that ``--output`` names.
        err: receives one line if the command fails.

    Returns:
        The exit code: 0 done, 1 refused or not there, 3 cluster unreachable.

    Raises:
        SystemExit: the arguments are wrong (code 2), or ``--help`` was given (code 0).
    """
    options = command_parser().parse_args(arguments or ["--help"])
    try:
        kube = KubeReader(options.kubeconfig, options.context)
        namespace = options.namespace or kube.namespace
        document, text = options.command(kube, namespace, options, _terminal(out))
    except KubeUnavailable as error:
        err.write(f"{_PROGRAM}: {error}\n")
        return UNREACHABLE
    except (CannotAnswer, InvalidSpec, KubeError) as error:
        err.write(f"{_PROGRAM}: {error}\n")
        return REFUSED
    if options.output == "json":
        text = json.dumps(document, indent=2, ensure_ascii=False)
    elif options.output == "yaml":
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip()
    try:
        out.write(text + "\n")
        out.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return 0


Answer = tuple[Json, str]


def _frontier(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = frontier_document(load_job(kube, namespace, options.job))
    return document, frontier_text(document, terminal, everything=options.all)


def _plan(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = plan_document(load_job(kube, namespace, options.job), options.point)
    return document, plan_text(document, terminal, everything=options.all)


def _explain(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = explanation(load_job(kube, namespace, options.job))
    return document, explanation_text(document, terminal)


def _doctor(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = examine(read_job(kube, namespace, options.job))
    return document, diagnosis_text(document, terminal)


def _report(_kube: KubeReader, namespace: str, options: Any, _: Terminal) -> Answer:
    everywhere = options.all_namespaces
    access = Access(
        options.prometheus_token_file, options.prometheus_ca, options.prometheus_cert, options.prometheus_key
    )
    query = Prometheus(options.prometheus, access)
    document = energy_report(query, options.since, options.by, None if everywhere else namespace)
    return document, energy_report_text(document, "any namespace" if everywhere else f"namespace {namespace}")


def _list(kube: KubeReader, namespace: str, options: Any, _: Terminal) -> Answer:
    everywhere = None if options.all_namespaces else namespace
    try:
        jobs = kube.jobs(everywhere)
    except KubeForbidden as error:
        raise CannotAnswer(f"access denied: {error}") from error
    except KubeNotFound as error:
        raise CannotAnswer(NO_DEFINITION) from error
    classes = list(refused_namespaces(kube)) if everywhere is None else [class_of_namespace(kube, namespace)]
    document = listing(jobs, [found for found in classes if found and not (found["applied"] and jobs)])
    return document, listing_text(document, "any namespace" if everywhere is None else f"namespace {namespace}")


def _set(kube: KubeReader, namespace: str, options: Any, _: Terminal) -> Answer:
    messages: list[str] = []

    def edit(job: Json, before: str) -> str:
        entry = Declaration(_straggler_id(job, options), _delay_s(job, options.delay), options.slowdown)
        spec = parse_spec(JobSpec, job.get("spec"))
        when = f" in {entry.delay_s:g} s" if entry.delay_s else ""
        messages[:] = [f"{_named(options)} of {namespace}/{options.job} takes {entry.slowdown:g} times as long{when}"]
        if entry.slowdown == 1.0:
            messages[:] = [f"{_named(options)} of {namespace}/{options.job} is back to normal"]
        if spec.straggler.mode is StragglerMode.IGNORE:
            messages.append("spec.straggler.mode is Ignore: the operator ignores it until the mode is changed")
        return declare(before, entry)

    return _edit(kube, namespace, options, edit, messages)


def _clear(kube: KubeReader, namespace: str, options: Any, _: Terminal) -> Answer:
    messages: list[str] = []

    def edit(job: Json, before: str) -> str:
        if options.pipeline is None and options.gpu is None:
            messages[:] = [f"no pipeline of {namespace}/{options.job} is declared slow any more"]
            return ""  # also if the present annotation is invalid
        straggler_id = _straggler_id(job, options)
        known = any(entry.id == straggler_id for entry in parse_annotation(before))
        outcome = "is back to normal" if known else "was not declared slow"
        messages[:] = [f"{_named(options)} of {namespace}/{options.job} {outcome}"]
        return declare(before, Declaration(straggler_id, 0.0, 1.0))

    return _edit(kube, namespace, options, edit, messages)


def _edit(kube: KubeReader, namespace: str, options: Any, edit: Any, messages: list[str]) -> Answer:
    read_job(kube, namespace, options.job)
    written = kube.edit_annotation(namespace, options.job, keys.ANNOTATION_STRAGGLER, edit)
    document = {
        "job": f"{namespace}/{options.job}",
        "annotation": written,
        "stragglers": [
            {"id": entry.id, "delaySeconds": entry.delay_s, "slowdown": entry.slowdown}
            for entry in parse_annotation(written)
        ],
    }
    return document, "\n".join(messages)


def _straggler_id(job: Json, options: Any) -> str:
    """Return the id of the annotation's entry: a data-parallel rank or a GPU UUID."""
    if options.gpu is not None:
        return str(options.gpu)
    pipelines = int(job.get("spec", {}).get("pipeline", {}).get("dataParallel", 1))
    if not 0 <= options.pipeline < pipelines:
        raise CannotAnswer(f"--pipeline: the job has data-parallel ranks 0 to {pipelines - 1}, not {options.pipeline}")
    return str(options.pipeline)


def _named(options: Any) -> str:
    return f"pipeline {options.pipeline}" if options.gpu is None else f"the pipeline of {options.gpu}"


def _delay_s(job: Json, text: str) -> float:
    """Return a delay in seconds: ``30s`` as given, ``20it`` from the measured or predicted iteration time."""
    match = _DELAY.fullmatch(text)
    assert match is not None, "argparse checks the pattern"
    number = float(match["number"])
    delay_s = number if match["unit"] == "s" else duration_of_iterations_s(number, job.get("status") or {})
    if delay_s is not None:
        return delay_s
    raise CannotAnswer("--delay: the time of an iteration is not known yet; give seconds, such as 30s")


def _terminal(out: TextIO) -> Terminal:
    colour = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "") != "dumb"
    fancy = (out.encoding or "").lower().replace("-", "") == "utf8"
    return Terminal(shutil.get_terminal_size((80, 24)).columns, colour, fancy)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    common = CommandParser(add_help=False)
    common.add_argument("-n", "--namespace", help="namespace of the job; default: the context's")
    common.add_argument("--context", help="context of the kubeconfig; default: the current one")
    common.add_argument("--kubeconfig", metavar="FILE", help="file to read; default: KUBECONFIG, or ~/.kube/config")
    common.add_argument(
        "-o", "--output", choices=("table", "json", "yaml"), default="table", help="format; default: table"
    )
    parser = CommandParser(
        prog=_PROGRAM,
        formatter_class=argparse.HelpFormatter,
        description="Show the plans of pipeline-parallel training jobs, their time and energy, and declare stragglers.",
        epilog="Exit codes: 0 done; 1 no such job or frontier, or refused; 2 wrong arguments; 3 cluster unreachable.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    job = CommandParser(add_help=False, parents=[common])
    job.add_argument("job", metavar="JOB", help="name of the PerseusJob")

    shown = commands.add_parser("list", parents=[common], help="all jobs, what they save, and why one does not")
    shown.add_argument("-A", "--all-namespaces", action="store_true", help="of the whole cluster")
    shown.set_defaults(command=_list)
    shown = commands.add_parser("report", parents=[common], help="energy that jobs took and saved, from a Prometheus")
    shown.add_argument("-A", "--all-namespaces", action="store_true", help="of the whole cluster")
    shown.add_argument("--since", type=_since, default="30d", metavar="30d", help="how far back; default: 30d")
    shown.add_argument("--by", choices=tuple(GROUPS), default="job", help="what a row is; default: job")
    shown.add_argument(
        "--prometheus",
        type=_url,
        default=os.environ.get("PERSEUS_PROMETHEUS", "http://localhost:9090"),
        metavar="URL",
        help="of the site; default: PERSEUS_PROMETHEUS, or http://localhost:9090",
    )
    for name, what in (
        ("token-file", f"holds the bearer token that it wants; default: the token in {ENV_TOKEN}, if there is one"),
        ("ca", "authority (PEM) of its certificate; default: the system's"),
        ("cert", "certificate (PEM) that it wants from you; needs --prometheus-key"),
        ("key", "private key (PEM) of that certificate"),
    ):
        shown.add_argument(f"--prometheus-{name}", type=Path, metavar="FILE", help=what)
    shown.set_defaults(command=_report)
    shown = commands.add_parser("doctor", parents=[job], help="why a job does not save, step by step, and what to do")
    shown.set_defaults(command=_doctor)
    shown = commands.add_parser("frontier", parents=[job], help="time, energy and savings of every plan of a job")
    shown.add_argument("--all", action="store_true", help="show every point in the table")
    shown.set_defaults(command=_frontier)
    shown = commands.add_parser("plan", parents=[job], help="clocks of the instructions in the plan in force")
    shown.add_argument("--point", type=int, metavar="N", help="show this point instead; 0 is the fastest")
    shown.add_argument("--all", action="store_true", help="show every instruction in the order in which it runs")
    shown.set_defaults(command=_plan)
    shown = commands.add_parser("explain", parents=[job], help="why this plan is in force, its cost and its savings")
    shown.set_defaults(command=_explain)

    straggler = commands.add_parser("straggler", help="declare that a pipeline is slow, or end the declaration")
    actions = straggler.add_subparsers(metavar="ACTION", required=True)
    declare_parser = actions.add_parser("set", parents=[job], help="declare a straggler, now or after a delay")
    _add_straggler_id(declare_parser.add_mutually_exclusive_group(required=True))
    declare_parser.add_argument(
        "--slowdown",
        type=_slowdown,
        required=True,
        metavar="FACTOR",
        help="iteration time divided by planned time, such as 1.2; 1: no slowdown",
    )
    declare_parser.add_argument(
        "--delay",
        type=_delay,
        default="0s",
        metavar="30s|20it",
        help="when it takes effect; default: 0s",
    )
    declare_parser.set_defaults(command=_set)
    cleared = actions.add_parser(
        "clear", parents=[job], help="end a declaration; without --pipeline or --gpu: all of them"
    )
    _add_straggler_id(cleared.add_mutually_exclusive_group())
    cleared.set_defaults(command=_clear)
    return parser


def _add_straggler_id(group: Any) -> None:
    group.add_argument("--pipeline", type=int, metavar="RANK", help="data-parallel rank of the pipeline, from 0")
    group.add_argument("--gpu", metavar="UUID", help="UUID of any GPU of the pipeline")


def _slowdown(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= 100.0:
        raise argparse.ArgumentTypeError(f"must be a factor from 1 (back to normal) to 100, such as 1.2, not {text!r}")
    return factor


def _url(text: str) -> str:
    try:
        parse_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; such as http://localhost:9090") from None
    return text


def _since(text: str) -> str:
    if not SINCE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a time such as 12h, 30d or 4w, not {text!r}")
    return text


def _delay(text: str) -> str:
    if not _DELAY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be seconds or iterations, such as 30s or 20it, not {text!r}")
    return text


if __name__ == "__main__":
    main()

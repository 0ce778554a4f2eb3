"""``kubectl perseus``: the commands, from arguments to one text or document; an error is one line on standard error.

Exit codes: 0 done; 1 refused: there is no such job or frontier, access is denied, or the request breaks a rule; 2 wrong
arguments; 3 the cluster cannot be reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

import yaml

from perseus_core import keys
from perseus_operator.errors import (
    CannotAnswer,
    InvalidSpec,
    KubeError,
    KubeForbidden,
    KubeNotFound,
    KubeUnavailable,
    UnusableArgument,
)
from perseus_operator.families.serving.status.explanation import pool_explanation, pool_listing
from perseus_operator.objects.values import Json
from perseus_operator.plugin.classes import class_of_namespace, refused_namespaces, refused_pods
from perseus_operator.plugin.doctor import examine
from perseus_operator.plugin.kube_client import KubeReader
from perseus_operator.plugin.listing import listing
from perseus_operator.plugin.named import NO_DEFINITION, exists, read_named
from perseus_operator.plugin.pool_doctor import examine_pool, surroundings_of
from perseus_operator.plugin.pool_plan import pool_plan
from perseus_operator.plugin.pool_tables import (
    everything_text,
    pool_explanation_text,
    pool_listing_text,
)
from perseus_operator.plugin.stragglers import DELAY, clear_straggler, declare_straggler
from perseus_operator.plugin.tables import (
    Terminal,
    diagnosis_text,
    explanation_text,
    frontier_text,
    plan_text,
)
from perseus_operator.report import command as report_command
from perseus_operator.report import stored
from perseus_runtime.command_line import CommandParser
from perseus_runtime.direct import bypass_proxies

REFUSED, USAGE, UNREACHABLE = 1, 2, 3
_PROGRAM: Final = "kubectl perseus"


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
        The exit code: 0 done, 1 refused or not there, 2 a file that the arguments name cannot be used, 3 cluster
        unreachable.

    Raises:
        SystemExit: the arguments are wrong (code 2), or ``--help`` was given (code 0).
    """
    options = command_parser().parse_args(arguments or ["--help"])
    try:
        kube = KubeReader(options.kubeconfig, options.context)
        namespace = options.namespace or kube.namespace
        document, text = options.command(kube, namespace, options, _terminal(out))
    except UnusableArgument as error:
        err.write(f"{_PROGRAM}: {error}\n")
        return USAGE
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
    from perseus_operator.plugin.job import load_job
    from perseus_operator.plugin.reports import frontier_document

    document = frontier_document(load_job(kube, namespace, options.job))
    return document, frontier_text(document, terminal, everything=options.all)


def _plan(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    from perseus_operator.plugin.job import load_job
    from perseus_operator.plugin.reports import plan_document

    document = plan_document(load_job(kube, namespace, options.job), options.point)
    return document, plan_text(document, terminal, everything=options.all)


def _explain(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    kind, body = read_named(kube, namespace, options.job)
    if kind == keys.POOL_KIND:
        return _explain_pool(body, terminal)
    from perseus_operator.plugin.job import load_job
    from perseus_operator.plugin.reports import explanation

    document = explanation(load_job(kube, namespace, options.job))
    return document, explanation_text(document, terminal)


def _explain_pool(pool: Json, terminal: Terminal) -> Answer:
    document = pool_explanation(pool)
    return document, pool_explanation_text(document, terminal)


def _doctor(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    kind, body = read_named(kube, namespace, options.job)
    if kind == keys.POOL_KIND:
        document = examine_pool(body, surroundings_of(kube, body))
    else:
        document, name = examine(body), body["metadata"]["name"]
        if exists(kube, keys.POOL_KIND, namespace, name):
            document["note"] = f"a ServingPool has this name, too: kubectl perseus doctor sp/{name} is about it"
    return document, diagnosis_text(document, terminal)


def _serving(kube: KubeReader, namespace: str, options: Any, terminal: Terminal) -> Answer:
    planned = options.pool == "plan" and options.of
    if options.of and not planned:
        raise CannotAnswer(f"{options.pool} {options.of}: must be POOL, or plan POOL")
    if options.gateway and not planned:
        raise CannotAnswer("--gateway: only with plan POOL")
    if planned:
        return pool_plan(read_named(kube, namespace, options.of, (keys.POOL_KIND,))[1], options.gateway)
    if options.pool and options.all_namespaces:
        raise CannotAnswer("-A, --all-namespaces: not with the name of a pool, which has one namespace")
    if options.pool:
        return _explain_pool(read_named(kube, namespace, options.pool, (keys.POOL_KIND,))[1], terminal)
    everywhere = None if options.all_namespaces else namespace
    pools = _pools(kube, everywhere)
    document = pool_listing(pools, _classes(kube, everywhere, found_any=bool(pools)))
    return document, pool_listing_text(document, _place(everywhere))


def _pools(kube: KubeReader, everywhere: str | None) -> list[Json]:
    try:
        return kube.pools(everywhere)
    except KubeForbidden as error:
        raise CannotAnswer(f"access denied: {error}") from error
    except KubeNotFound as error:
        raise CannotAnswer(NO_DEFINITION.replace(keys.KIND, keys.POOL_KIND)) from error


def _classes(kube: KubeReader, everywhere: str | None, *, found_any: bool) -> list[Json]:
    """What is to be said of namespaces that ask for a class; of one that is applied only where nothing was found."""
    classes = list(refused_namespaces(kube)) if everywhere is None else [class_of_namespace(kube, everywhere)]
    return [answer for answer in classes if answer and not (answer["applied"] and found_any)]


def _refused_pods(kube: KubeReader, everywhere: str | None, said: list[Json], jobs: list[Json]) -> list[Json]:
    """What is to be said of pods that ask for a class of which nothing is said yet."""
    classes = {(answer["namespace"], answer["class"]) for answer in said if not answer["applied"]}
    names = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in jobs}
    answers = refused_pods(kube, everywhere, names)
    return [answer for answer in answers if (answer["namespace"], answer["class"]) not in classes]


def _place(everywhere: str | None) -> str:
    return "any namespace" if everywhere is None else f"namespace {everywhere}"


def _report(kube: KubeReader, namespace: str, options: Any, _: Terminal) -> Answer:
    where = None if options.all_namespaces else namespace

    def labels(key: str) -> dict[str, Json]:
        try:
            namespaces = kube.namespaces(key) if where is None else {where: kube.namespace_labels(where)}
        except KubeForbidden as error:
            raise CannotAnswer(f"access denied: {error}") from error
        return {name: {key: labels_there[key]} for name, labels_there in namespaces.items() if key in labels_there}

    statement, by = report_command.report(options, report_command.Scope(namespace=where, labels=labels))
    return stored.document(statement, by), report_command.text(statement, by, options.format)


def _list(kube: KubeReader, namespace: str, options: Any, _: Terminal) -> Answer:
    everywhere = None if options.all_namespaces else namespace
    try:
        jobs = kube.jobs(everywhere)
    except KubeForbidden as error:
        raise CannotAnswer(f"access denied: {error}") from error
    except KubeNotFound as error:
        raise CannotAnswer(NO_DEFINITION) from error
    pools = []
    with contextlib.suppress(KubeForbidden, KubeNotFound):  # a user of jobs alone wants to see these
        pools = kube.pools(everywhere)
    classes = _classes(kube, everywhere, found_any=bool(jobs or pools))
    classes += _refused_pods(kube, everywhere, classes, [*jobs, *pools])
    document = listing(jobs, classes)
    document["pools"] = pool_listing(pools)["pools"]
    return document, everything_text(document, _place(everywhere))


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
        description="Show what training jobs and pools that serve do with their clocks, why, and what it saves.",
        epilog="Exit codes: 0 done; 1 no such object or frontier, or refused; 2 wrong arguments; 3 no cluster reached.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    job = CommandParser(add_help=False, parents=[common])
    job.add_argument("job", metavar="JOB", help="name of the PerseusJob")
    either = CommandParser(add_help=False, parents=[common])
    either.add_argument(
        "job", metavar="NAME", help="name of the PerseusJob or ServingPool; pj/NAME or sp/NAME where both have it"
    )

    shown = commands.add_parser(
        "list", parents=[common], help="all jobs and pools, what they save, and why one does not"
    )
    shown.add_argument("-A", "--all-namespaces", action="store_true", help="of the whole cluster")
    shown.set_defaults(command=_list)
    shown = commands.add_parser(
        "report", parents=[common], help="energy that jobs and pools took and saved, from a Prometheus"
    )
    shown.add_argument("-A", "--all-namespaces", action="store_true", help="of the whole cluster")
    report_command.add_arguments(shown)
    shown.set_defaults(command=_report)
    shown = commands.add_parser("serving", parents=[common], help="all pools that serve; of one, what it does and why")
    shown.add_argument(
        "pool", metavar="POOL", nargs="?", help="name of the ServingPool; default: all; plan POOL: its plan by length"
    )
    shown.add_argument("of", metavar="POOL", nargs="?", help="whose plan of pools by length is shown, after plan")
    shown.add_argument(
        "--gateway", metavar="NAME", help="print that plan as manifests for this Gateway: InferencePools, an HTTPRoute"
    )
    shown.add_argument("-A", "--all-namespaces", action="store_true", help="of the whole cluster")
    shown.set_defaults(command=_serving)
    shown = commands.add_parser(
        "doctor", parents=[either], help="why a job or pool does not save, step by step, and what to do"
    )
    shown.set_defaults(command=_doctor)
    shown = commands.add_parser("frontier", parents=[job], help="time, energy and savings of every plan of a job")
    shown.add_argument("--all", action="store_true", help="show every point in the table")
    shown.set_defaults(command=_frontier)
    shown = commands.add_parser("plan", parents=[job], help="clocks of the instructions in the plan in force")
    shown.add_argument("--point", type=int, metavar="N", help="show this point instead; 0 is the fastest")
    shown.add_argument("--all", action="store_true", help="show every instruction in the order in which it runs")
    shown.set_defaults(command=_plan)
    shown = commands.add_parser("explain", parents=[either], help="why this plan is in force, its cost and its savings")
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
    declare_parser.set_defaults(command=declare_straggler)
    cleared = actions.add_parser(
        "clear", parents=[job], help="end a declaration; without --pipeline or --gpu: all of them"
    )
    _add_straggler_id(cleared.add_mutually_exclusive_group())
    cleared.set_defaults(command=clear_straggler)
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


def _delay(text: str) -> str:
    if not DELAY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be seconds or iterations, such as 30s or 20it, not {text!r}")
    return text


if __name__ == "__main__":
    main()

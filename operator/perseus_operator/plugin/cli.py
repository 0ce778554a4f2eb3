"""``kubectl perseus``: the commands. Arguments in, one text or document out; bad news is one line on standard error.

Exit codes: 0 done; 1 no: there is no such job or frontier, it may not be seen, or what was asked breaks a rule; 2 wrong
arguments; 3 the cluster cannot be reached. Nothing is drawn or decided here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

import yaml

from perseus_operator.api.job import StragglerMode, parse_spec
from perseus_operator.errors import CannotAnswer, InvalidSpec, KubeError, KubeUnavailable
from perseus_operator.objects import Json
from perseus_operator.planning.stragglers.annotation import (
    Declaration,
    declare,
    duration_of_iterations_s,
    parse_annotation,
)
from perseus_operator.plugin.job import gather, job_of
from perseus_operator.plugin.kube_client import Cluster
from perseus_operator.plugin.reports import explanation, frontier_document, plan_document
from perseus_operator.plugin.tables import Terminal, explanation_text, frontier_text, plan_text
from perseus_proto import keys

NO, USAGE, UNREACHABLE = 1, 2, 3
_PROGRAM: Final = "kubectl perseus"
_DELAY = re.compile(r"(?P<number>\d{1,7}(?:\.\d{1,6})?)(?P<unit>s|it)")


def main() -> None:
    """Entry point of ``kubectl-perseus``."""
    sys.exit(run(sys.argv[1:], sys.stdout, sys.stderr))


def run(arguments: Sequence[str], out: TextIO, err: TextIO) -> int:
    """One command; the exit code. Wrong arguments leave through argparse (SystemExit)."""
    options = _parser().parse_args(arguments)
    try:
        cluster = Cluster(options.kubeconfig, options.context)
        namespace = options.namespace or cluster.namespace
        document, text = options.command(cluster, namespace, options, _terminal(out))
    except KubeUnavailable as error:
        err.write(f"{_PROGRAM}: {error}\n")
        return UNREACHABLE
    except (CannotAnswer, InvalidSpec, KubeError) as error:
        err.write(f"{_PROGRAM}: {error}\n")
        return NO
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


def _frontier(cluster: Cluster, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = frontier_document(gather(cluster, namespace, options.job))
    return document, frontier_text(document, terminal, everything=options.all)


def _plan(cluster: Cluster, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = plan_document(gather(cluster, namespace, options.job), options.point)
    return document, plan_text(document, terminal, everything=options.all)


def _explain(cluster: Cluster, namespace: str, options: Any, terminal: Terminal) -> Answer:
    document = explanation(gather(cluster, namespace, options.job))
    return document, explanation_text(document, terminal)


def _set(cluster: Cluster, namespace: str, options: Any, _: Terminal) -> Answer:
    said: list[str] = []

    def edit(job: Json, before: str) -> str:
        entry = Declaration(_who(job, options), _delay_s(job, options.delay), options.slowdown)
        spec = parse_spec(job.get("spec"))
        when = f" in {entry.delay_s:g} s" if entry.delay_s else ""
        said[:] = [f"{_named(options)} of {namespace}/{options.job} is {entry.slowdown:g} times slower{when}"]
        if entry.slowdown == 1.0:
            said[:] = [f"{_named(options)} of {namespace}/{options.job} is back to normal"]
        if spec.straggler.mode is StragglerMode.OFF:
            said.append("spec.straggler.mode is Off: the operator ignores it")
        return declare(before, entry)

    return _edit(cluster, namespace, options, edit, said)


def _clear(cluster: Cluster, namespace: str, options: Any, _: Terminal) -> Answer:
    said: list[str] = []

    def edit(job: Json, before: str) -> str:
        if options.pipeline is None and options.gpu is None:
            said[:] = [f"no pipeline of {namespace}/{options.job} is declared slow any more"]
            return ""  # whatever stands there, readable or not
        who = _who(job, options)
        known = any(entry.id == who for entry in parse_annotation(before))
        outcome = "is back to normal" if known else "was not declared slow"
        said[:] = [f"{_named(options)} of {namespace}/{options.job} {outcome}"]
        return declare(before, Declaration(who, 0.0, 1.0))

    return _edit(cluster, namespace, options, edit, said)


def _edit(cluster: Cluster, namespace: str, options: Any, edit: Any, said: list[str]) -> Answer:
    job_of(cluster, namespace, options.job)
    written = cluster.edit_annotation(namespace, options.job, keys.ANNOTATION_STRAGGLER, edit)
    document = {
        "job": f"{namespace}/{options.job}",
        "annotation": written,
        "stragglers": [
            {"id": entry.id, "delaySeconds": entry.delay_s, "slowdown": entry.slowdown}
            for entry in parse_annotation(written)
        ],
    }
    return document, "\n".join(said)


def _who(job: Json, options: Any) -> str:
    """The id of the annotation."""
    if options.gpu is not None:
        return str(options.gpu)
    pipelines = int(job.get("spec", {}).get("pipeline", {}).get("dataParallel", 1))
    if not 0 <= options.pipeline < pipelines:
        raise CannotAnswer(f"--pipeline: the job has pipelines 0 to {pipelines - 1}, not {options.pipeline}")
    return str(options.pipeline)


def _named(options: Any) -> str:
    return f"pipeline {options.pipeline}" if options.gpu is None else f"the pipeline of {options.gpu}"


def _delay_s(job: Json, text: str) -> float:
    """``30s`` as it is; ``20it`` by what an iteration takes now, or should take."""
    match = _DELAY.fullmatch(text)
    assert match is not None, "argparse has checked it"
    number = float(match["number"])
    delay_s = number if match["unit"] == "s" else duration_of_iterations_s(number, job.get("status") or {})
    if delay_s is not None:
        return delay_s
    raise CannotAnswer("--delay: nobody knows yet what an iteration takes; give seconds, such as 30s")


def _terminal(out: TextIO) -> Terminal:
    colour = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "") != "dumb"
    fancy = (out.encoding or "").lower().replace("-", "") == "utf8"
    return Terminal(shutil.get_terminal_size((80, 24)).columns, colour, fancy)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-n", "--namespace", help="of the job; default: the context's")
    common.add_argument("--context", help="of the kubeconfig; default: the current one")
    common.add_argument("--kubeconfig", metavar="FILE", help="default: KUBECONFIG, or ~/.kube/config")
    common.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Plans of pipeline-parallel training jobs: what they cost and save, and why they run.",
        epilog="Exit codes: 0 done; 1 no such job or frontier, or refused; 2 wrong arguments; 3 no cluster.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    job = argparse.ArgumentParser(add_help=False, parents=[common])
    job.add_argument("job", metavar="JOB", help="name of the PerseusJob")

    shown = commands.add_parser("frontier", parents=[job], help="every plan of a job: time, energy, savings, drawn")
    shown.add_argument("--all", action="store_true", help="every point in the table")
    shown.set_defaults(command=_frontier)
    shown = commands.add_parser("plan", parents=[job], help="the clock of every instruction of the plan in force")
    shown.add_argument("--point", type=int, metavar="N", help="another point of the frontier; 0 is the fastest")
    shown.add_argument("--all", action="store_true", help="every instruction in the order in which it runs")
    shown.set_defaults(command=_plan)
    shown = commands.add_parser("explain", parents=[job], help="why this plan, what it costs and what it saves")
    shown.set_defaults(command=_explain)

    straggler = commands.add_parser("straggler", help="say that a pipeline is slow, or that it is no more")
    actions = straggler.add_subparsers(metavar="ACTION", required=True)
    declare_parser = actions.add_parser("set", parents=[job], help="a pipeline is slower than the others, or will be")
    who = declare_parser.add_mutually_exclusive_group(required=True)
    _name_who(who)
    declare_parser.add_argument(
        "--slowdown", type=_slowdown, required=True, metavar="FACTOR", help="1.2, say; 1: back to normal"
    )
    declare_parser.add_argument(
        "--delay", type=_delay, default="0s", metavar="30s|20it", help="from when: seconds or iterations"
    )
    declare_parser.set_defaults(command=_set)
    cleared = actions.add_parser("clear", parents=[job], help="it is over; without --pipeline or --gpu: for all")
    _name_who(cleared.add_mutually_exclusive_group())
    cleared.set_defaults(command=_clear)
    return parser


def _name_who(group: Any) -> None:
    group.add_argument("--pipeline", type=int, metavar="RANK", help="its data-parallel rank")
    group.add_argument("--gpu", metavar="UUID", help="any GPU of it")


def _slowdown(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= 100.0:
        raise argparse.ArgumentTypeError(f"must be a factor from 1 (back to normal) to 100, such as 1.2, not {text!r}")
    return factor


def _delay(text: str) -> str:
    if not _DELAY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be seconds or iterations, such as 30s or 20it, not {text!r}")
    return text


if __name__ == "__main__":
    main()

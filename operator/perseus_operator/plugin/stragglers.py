"""``kubectl perseus straggler``: a user declares that a pipeline is slow, or that it is no more, by an annotation."""

from __future__ import annotations

import re
from typing import Any, Final

from perseus_core import keys
from perseus_operator.api.job import JobSpec, StragglerMode
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import CannotAnswer
from perseus_operator.families.training.features.stragglers.annotation import (
    Declaration,
    declare,
    duration_of_iterations_s,
    parse_annotation,
)
from perseus_operator.families.training.shape import completed, shape_from_status
from perseus_operator.objects.values import Json
from perseus_operator.plugin.kube_client import KubeReader
from perseus_operator.plugin.named import read_named

DELAY: Final = re.compile(r"(?P<number>\d{1,7}(?:\.\d{1,6})?)(?P<unit>s|it)")
"""A time as ``--delay`` has it."""


def declare_straggler(kube: KubeReader, namespace: str, options: Any, _: object) -> tuple[Json, str]:
    """Declare that a pipeline is slow; return document and text. Raises CannotAnswer, InvalidSpec or KubeError."""
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


def clear_straggler(kube: KubeReader, namespace: str, options: Any, _: object) -> tuple[Json, str]:
    """End a declaration, or all of a job; return and raise as ``declare_straggler``."""
    messages: list[str] = []

    def edit(job: Json, before: str) -> str:
        if options.pipeline is None and options.gpu is None:
            messages[:] = [f"no pipeline of {namespace}/{options.job} is declared slow any more"]
            return ""  # also if the present annotation is invalid
        straggler_id = _straggler_id(job, options)
        declared = any(entry.id == straggler_id for entry in parse_annotation(before))
        outcome = "is back to normal" if declared else "was not declared slow"
        messages[:] = [f"{_named(options)} of {namespace}/{options.job} {outcome}"]
        return declare(before, Declaration(straggler_id, 0.0, 1.0))

    return _edit(kube, namespace, options, edit, messages)


def _edit(kube: KubeReader, namespace: str, options: Any, edit: Any, messages: list[str]) -> tuple[Json, str]:
    name = read_named(kube, namespace, options.job, (keys.KIND,))[1]["metadata"]["name"]
    written = kube.edit_annotation(namespace, name, keys.ANNOTATION_STRAGGLER, edit)
    document = {
        "job": f"{namespace}/{name}",
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
    shape = shape_from_status((job.get("status") or {}).get("shape"))
    spec = completed(parse_spec(JobSpec, job.get("spec")), options.job, shape)
    if not spec.shape_known:
        raise CannotAnswer("--pipeline: how many pipelines the job has is not known before its ranks have connected")
    pipelines = spec.pipeline.data_parallel
    if not 0 <= options.pipeline < pipelines:
        raise CannotAnswer(f"--pipeline: the job has data-parallel ranks 0 to {pipelines - 1}, not {options.pipeline}")
    return str(options.pipeline)


def _named(options: Any) -> str:
    return f"pipeline {options.pipeline}" if options.gpu is None else f"the pipeline of {options.gpu}"


def _delay_s(job: Json, text: str) -> float:
    """Return a delay in seconds: ``30s`` as given, ``20it`` from the measured or predicted iteration time."""
    match = DELAY.fullmatch(text)
    assert match is not None, "argparse checks the pattern"
    number = float(match["number"])
    delay_s = number if match["unit"] == "s" else duration_of_iterations_s(number, job.get("status") or {})
    if delay_s is not None:
        return delay_s
    raise CannotAnswer("--delay: the time of an iteration is not known yet; give seconds, such as 30s")

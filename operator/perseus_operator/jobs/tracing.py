"""Traces by OpenTelemetry: one for each edit of a PerseusJob, from the edit until its plan is in force.

A trace begins with the span ``edit``. What the operator then does for the job is a span each (reading inputs, solving,
each command to an agent), and the last one, ``plan in force``, lasts from the edit until the agents follow the plan.
A user who edits may give it a parent: the annotation ``perseus.energy/traceparent`` in the form of W3C Trace
Context. Agents open no connections and so export nothing; what they answer is in the operator's spans.

``perseus_operator.clients.otlp`` exports them. Without an endpoint nothing is recorded, and OpenTelemetry's own empty
spans cost next to nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from perseus_core import keys
from perseus_operator.api.conditions import ConditionType
from perseus_operator.objects.values import JobRef

MOST_STEPS: Final = 200
"""Spans of one trace: a job without a plan, as in mode Recommend, reads its inputs again and again."""

_tracer: Final = trace.get_tracer("perseus_operator")


def failed(error: Exception) -> None:
    """Note in the current span that its step failed."""
    span = trace.get_current_span()
    span.record_exception(error)
    span.set_status(trace.StatusCode.ERROR, str(error))


def log_fields() -> dict[str, str]:
    """The trace to which a line of the log belongs; nothing outside of one."""
    context = trace.get_current_span().get_span_context()
    return {"trace_id": trace.format_trace_id(context.trace_id)} if context.is_valid else {}


class EditTrace:
    """The trace of a job's latest edit."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._began = 0
        self._steps = 0
        self._running = 0

    def begin(self, ref: JobRef, generation: int, annotations: Mapping[str, str], *, edited: bool) -> None:
        """Begin the trace of an edit; that of an earlier one gets no more spans.

        Args:
            ref: the job.
            generation: of the PerseusJob after the edit.
            annotations: of the PerseusJob; one may name the parent.
            edited: False: the job was there before this operator, and is only taken over.
        """
        parent = TraceContextTextMapPropagator().extract({"traceparent": annotations.get(keys.ANNOTATION_TRACE, "")})
        attributes: dict[str, str | int] = {
            "k8s.namespace.name": ref.namespace,
            "perseus.job.name": ref.name,
            "perseus.job.uid": ref.uid,
            "perseus.job.generation": generation,
        }
        self._began, self._steps = time.time_ns(), 0
        name = "edit" if edited else "take over"
        span = _tracer.start_span(name, parent, attributes=attributes, start_time=self._began)
        span.end()  # spans that never end are never exported, and a plan may never come
        self._context = trace.set_span_in_context(span, parent) if span.get_span_context().is_valid else None

    def step(self, name: str, **attributes: str) -> contextlib.AbstractContextManager[None]:
        """Record what is done under this context as a span of the trace, if one is under way."""
        self._running += 1
        return self._stepping(name, attributes)

    @contextlib.contextmanager
    def _stepping(self, name: str, attributes: Mapping[str, str]) -> Iterator[None]:
        self._steps += 1
        traced = self._context is not None and self._steps <= MOST_STEPS
        try:
            with (
                _tracer.start_as_current_span(name, self._context, attributes=attributes)
                if traced
                else contextlib.nullcontext()
            ):
                yield
        finally:
            self._running -= 1

    def reported(self, status: Mapping[str, Any], generation: int) -> None:
        """Take in a status as it is stored. The trace ends when it says that the plan of the edit is in force.

        While a step is under way, it may still be the plan from before the edit.
        """
        if self._context is None or self._running:
            return
        for condition in status.get("conditions", ()):
            applied = (condition["type"], condition["status"]) == (ConditionType.PLAN_APPLIED.value, "True")
            if applied and condition.get("observedGeneration") == generation:
                attributes = {"perseus.plan": condition["message"]}
                span = _tracer.start_span("plan in force", self._context, attributes=attributes, start_time=self._began)
                span.end()
                self._context = None

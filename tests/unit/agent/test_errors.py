"""One table from agent errors to gRPC codes: complete, and its split into retryable and not is what the operator
relies on."""

from __future__ import annotations

import grpc
import pytest

from perseus_agent import errors
from perseus_agent.servers.grpc_service import STATUS, status_of

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.AgentError) and kind is not errors.AgentError
]


def instance(kind: type[errors.AgentError]) -> errors.AgentError:
    return kind("message")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_a_code(kind: type[errors.AgentError]) -> None:
    if kind is not errors.RequestError:  # abstract: only its subclasses are raised
        assert any(ancestor in STATUS for ancestor in kind.__mro__)
    assert str(instance(kind)) == "message"


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if issubclass(kind, errors.RequestError)])
def test_what_the_caller_did_wrong_never_looks_like_our_fault(kind: type[errors.AgentError]) -> None:
    if kind is not errors.RequestError:
        assert kind in STATUS
        assert status_of(instance(kind)) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)


def test_only_passing_conditions_are_retryable() -> None:
    retryable = {kind.__name__ for kind, code in STATUS.items() if code is grpc.StatusCode.UNAVAILABLE}
    assert retryable == {"Draining", "KubeletUnavailable"}


def test_every_class_is_drawn_in_the_tree() -> None:
    assert errors.__doc__
    for kind in CLASSES:
        assert f"── {kind.__name__} " in errors.__doc__

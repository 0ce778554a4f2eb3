"""Errors of the API server, each one a Kubernetes ``Status`` body with its HTTP code.

Tree::

    ApiError
    ├── BadRequest            400
    ├── Forbidden             403
    ├── NotFound              404
    ├── MethodNotAllowed      405
    ├── AlreadyExists         409
    ├── Conflict              409
    ├── Expired               410  a revision that is no longer remembered
    ├── UnsupportedMediaType  415
    └── Unprocessable         422  a patch that cannot be applied
        └── Invalid                names every field and the rule it breaks
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Json = dict[str, Any]


@dataclass(frozen=True)
class StatusCause:
    """One rule broken by one field, in Kubernetes' words."""

    field: str
    reason: str
    message: str

    @classmethod
    def invalid(cls, field: str, value: object, rule: str) -> StatusCause:
        """A value that breaks a rule."""
        return cls(field, "FieldValueInvalid", f"Invalid value: {shown(value)}: {rule}")

    @classmethod
    def required(cls, field: str) -> StatusCause:
        """A value that is missing."""
        return cls(field, "FieldValueRequired", "Required value")

    @classmethod
    def forbidden(cls, field: str, rule: str) -> StatusCause:
        """A field that must not be set or changed here."""
        return cls(field, "FieldValueForbidden", f"Forbidden: {rule}")


def shown(value: object) -> str:
    """A value as Kubernetes prints it in messages: JSON, objects by their type alone."""
    return json.dumps("object" if isinstance(value, dict) else "array" if isinstance(value, list) else value)


class ApiError(Exception):
    """Base: becomes the response."""

    code: ClassVar[int] = 500
    reason: ClassVar[str] = "InternalError"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def status(self) -> Json:
        """The response body."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


class BadRequest(ApiError):
    code = 400
    reason = "BadRequest"


class Forbidden(ApiError):
    code = 403
    reason = "Forbidden"


class NotFound(ApiError):
    code = 404
    reason = "NotFound"

    @classmethod
    def path(cls) -> NotFound:
        """No such endpoint."""
        return cls("the server could not find the requested resource")


class MethodNotAllowed(ApiError):
    code = 405
    reason = "MethodNotAllowed"


class AlreadyExists(ApiError):
    code = 409
    reason = "AlreadyExists"


class Conflict(ApiError):
    code = 409
    reason = "Conflict"


class Expired(ApiError):
    code = 410
    reason = "Expired"


class UnsupportedMediaType(ApiError):
    code = 415
    reason = "UnsupportedMediaType"


class Unprocessable(ApiError):
    code = 422
    reason = "Invalid"


class Invalid(Unprocessable):
    def __init__(self, kind: str, group: str, name: str, causes: Sequence[StatusCause]) -> None:
        listed = [f"{cause.field}: {cause.message}" for cause in causes]
        text = listed[0] if len(listed) == 1 else "[" + ", ".join(listed) + "]"
        super().__init__(
            f'{kind}{"." + group if group else ""} "{name}" is invalid: {text}',
            name=name,
            group=group,
            kind=kind,
            causes=[{"reason": c.reason, "message": c.message, "field": c.field} for c in causes],
        )

"""Descriptions of hardware that users give, refused as the solver refuses all its input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perseus_core.hardware import Hardware
from perseus_solver.errors import SolverError


class InvalidHardware(SolverError):
    """The description of the hardware cannot be used."""


def hardware_from_json(text: str | bytes) -> Hardware:
    """Read a description; see `Hardware.from_json`.

    Raises:
        InvalidHardware: the message names the field and the rule.
    """
    with _refused():
        return Hardware.from_json(text)


def published_hardware(model: str) -> Hardware:
    """Return what to assume of a GPU model on which nothing was measured; see `Hardware.published`.

    Raises:
        InvalidHardware: the name is empty or too long.
    """
    with _refused():
        return Hardware.published(model)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InvalidHardware(str(error)) from None

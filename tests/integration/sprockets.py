"""Handlers of custom resources, as ``kopf run`` loads them; what they see they append to the file that SEEN names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kopf

GROUP, VERSION, PLURAL = "tests.perseus.energy", "v1", "sprockets"
SEEN = "SEEN"


def saw(line: str) -> None:
    """Append a line to what the handlers saw."""
    with Path(os.environ[SEEN]).open("a", encoding="utf-8") as seen:
        seen.write(line + "\n")


@kopf.on.startup()
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Write no events: who looks at the namespace sees the objects alone."""
    settings.posting.enabled = False


@kopf.on.login()
async def login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Log in as the kubeconfig says, never by another client library that is installed."""
    return kopf.login_with_kubeconfig(**arguments)


@kopf.on.create(GROUP, VERSION, PLURAL)
async def created(name: str, retry: int, patch: kopf.Patch, **_: Any) -> None:
    """Fail once, then mark the object as ready."""
    if retry == 0:
        raise kopf.TemporaryError("not yet", delay=0.1)
    saw(f"created {name} at attempt {retry + 1}")
    patch.status["ready"] = True


@kopf.on.update(GROUP, VERSION, PLURAL, field="spec.teeth")
async def updated(old: Any, new: Any, **_: Any) -> None:
    """See both values of a field that changed."""
    saw(f"updated {old} to {new}")


@kopf.on.delete(GROUP, VERSION, PLURAL)
async def deleted(name: str, **_: Any) -> None:
    """See the object while its finalizer holds it."""
    saw(f"deleted {name}")

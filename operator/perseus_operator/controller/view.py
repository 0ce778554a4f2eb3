"""What the web page may show of one job or pool: values only, copied on the operator's event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perseus_operator.api.job import JobSpec
from perseus_operator.objects.values import JobRef, Json
from perseus_operator.solving.frontier import SolvedFrontier


@dataclass(frozen=True)
class JobView:
    """One job at one moment."""

    ref: JobRef
    spec: JobSpec | None
    """The last accepted one."""
    status: Mapping[str, Any]
    """As ``kubectl get perseusjob -o yaml`` shows it."""
    solved: SolvedFrontier | None
    elsewhere: bool = False
    """Another replica serves it, which knows spec and frontier."""


@dataclass(frozen=True)
class PoolView:
    """One pool at one moment. All that is shown is stored, so any replica shows it."""

    ref: JobRef
    stored: Json
    """Metadata, spec and status, as ``kubectl get servingpool -o yaml`` shows them."""


View = JobView | PoolView

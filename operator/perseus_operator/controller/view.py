"""What the web page may show of one job: values only, copied on the operator's event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perseus_operator.api.job import JobSpec
from perseus_operator.objects.values import JobRef
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

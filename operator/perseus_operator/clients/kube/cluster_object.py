"""A cluster-wide object of ours whose status the operator writes: conditions that are merged, and figures."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from perseus_operator.api.conditions import Statement, merge_conditions
from perseus_operator.clients.kube.versioned import Versioned
from perseus_operator.errors import KubeError, KubeNotFound
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import Json, Now

logger = logging.getLogger(__name__)

_RETRY_S: Final = 5.0
Named = TypeVar("Named", bound="ClusterObject")


@dataclass
class ClusterObject:
    """One object as it was observed last."""

    kind: str
    name: str
    uid: str
    generation: int = 0
    fault: str = ""
    """Why its spec is not accepted; empty: it is."""
    stored: Versioned[Json] = field(default_factory=lambda: Versioned({}))
    """Its status."""
    retry_at_s: float = 0.0
    gone: bool = False
    """It was found to be deleted as its status was written, before the watch has said so."""

    def observed(self, body: Mapping[str, Any]) -> None:
        """Take in the object as it is now."""
        metadata = body["metadata"]
        self.stored.observed(dict(body.get("status") or {}), str(metadata.get("resourceVersion", "")))
        self.generation = int(metadata.get("generation", 1))

    async def write(
        self,
        conditions: Iterable[Statement],
        figures: Json,
        now: Now,
        send: Callable[[str, str, Json], Awaitable[str]],
    ) -> None:
        """Write the status if it has changed.

        Args:
            conditions: that hold now.
            figures: everything else in the status.
            now: the time.
            send: stores the status of the object of a name and UID, and returns the object's version after it.
        """
        written = self.stored.value
        wanted = {
            "observedGeneration": self.generation,
            "conditions": merge_conditions(
                written.get("conditions", ()), conditions, generation=self.generation, now_rfc3339=stamp(now.wall_s)
            ),
            **figures,
        }
        if wanted == written or now.monotonic_s < self.retry_at_s:
            return
        self.stored.write_started(wanted)
        try:
            version = await send(self.name, self.uid, wanted)
        except KubeNotFound:
            self.gone = True
        except KubeError as error:
            self.retry_at_s = now.monotonic_s + _RETRY_S
            logger.warning("%s %s: status not written: %s", self.kind, self.name, error)
        else:
            self.stored.write_succeeded(version)


def vanished(known: Iterable[Named], listed: Iterable[Mapping[str, Any]]) -> list[Named]:
    """Those that a list does not have which was asked for after they were known: deletions that the watch has missed,
    as between the list of an operator that starts and the begin of its watch.
    """
    uids = {str(body["metadata"]["uid"]) for body in listed}
    return [each for each in known if each.uid not in uids]

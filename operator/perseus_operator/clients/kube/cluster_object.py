"""Cluster-wide objects of ours, as they were observed last, and their status, which the operator writes.

A kind of them is a ``ClusterObjects``: what is listed and watched is taken in there, and the last spec that was
accepted stays in force while another is refused. What follows from an object is for the subclass.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from perseus_operator.api.conditions import Statement, merge_conditions
from perseus_operator.api.schema import parse_spec
from perseus_operator.clients.kube.versioned import Versioned
from perseus_operator.errors import InvalidSpec, KubeError, KubeNotFound
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import Json, Now

logger = logging.getLogger(__name__)

_RETRY_S: Final = 5.0
Spec = TypeVar("Spec")


@dataclass
class ClusterObject(Generic[Spec]):
    """One object as it was observed last."""

    kind: str
    name: str
    uid: str
    generation: int = 0
    spec: Spec | None = None
    """The last accepted one."""
    fault: str = ""
    """Why its spec is not accepted; empty: it is."""
    stored: Versioned[Json] = field(default_factory=lambda: Versioned({}))
    """Its status."""
    retry_at_s: float = 0.0
    gone: bool = False
    """It was found to be deleted as its status was written, before the watch has said so."""

    def observed(self, body: Mapping[str, Any], model: type[Spec]) -> bool:
        """Take in the object as it is now; whether another spec is accepted than before, or another fault found."""
        metadata, before = body["metadata"], (self.spec, self.fault)
        self.stored.observed(dict(body.get("status") or {}), str(metadata.get("resourceVersion", "")))
        self.generation = int(metadata.get("generation", 1))
        try:
            self.spec, self.fault = parse_spec(model, body.get("spec")), ""
        except InvalidSpec as error:
            self.fault = str(error)
        return (self.spec, self.fault) != before

    @property
    def refusal(self) -> str:
        """Why its spec is not accepted, and what holds instead; empty: it is."""
        note = " The spec accepted before stays in force." if self.spec is not None else ""
        return self.fault and self.fault + note

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


Kept = TypeVar("Kept", bound=ClusterObject[Any])


class ClusterObjects(ABC, Generic[Kept]):
    """All objects of one kind."""

    def __init__(self, make: Callable[[str, str], Kept], model: type[Any]) -> None:
        """Know none yet.

        Args:
            make: an object of a name and UID.
            model: of its spec.
        """
        self._new, self._model = make, model
        self._objects: dict[str, Kept] = {}

    async def restore(self) -> None:
        """List all: at the start, before any job is observed, and now and then, for what the watch has missed.

        A deletion is missed, for one, between the list of an operator that starts and the begin of its watch.

        Raises:
            KubeError: no answer.
        """
        before = list(self._objects.values())
        listed = await self._list()
        for body in listed:
            self.observe(body)
        uids = {str(body["metadata"]["uid"]) for body in listed}
        for each in before:
            if each.uid not in uids:
                self._forget(each)

    def observe(self, body: Mapping[str, Any]) -> None:
        """Take in an object as it is now."""
        name, uid = str(body["metadata"]["name"]), str(body["metadata"]["uid"])
        kept = self._objects.get(name)
        new = kept is None or kept.uid != uid
        if kept is None or new:
            kept = self._objects[name] = self._new(name, uid)
        changed = kept.observed(body, self._model)
        self._observed(kept, body.get("status") or {}, new=new)
        if changed:
            self._spec_changed()

    def deleted(self, body: Mapping[str, Any]) -> None:
        """Take in that an object does not exist any more."""
        kept = self._objects.get(str(body["metadata"]["name"]))
        if kept is not None and kept.uid == body["metadata"]["uid"]:
            self._forget(kept)

    async def _write_status(self, kept: Kept, conditions: Iterable[Statement], figures: Json, now: Now) -> None:
        """Write the status of an object if it has changed."""
        await kept.write(conditions, figures, now, self._send)
        if kept.gone:
            self._forget(kept)

    def _forget(self, kept: Kept) -> None:
        """It does not exist any more."""
        if self._objects.get(kept.name) is kept:
            del self._objects[kept.name]
            self._forgotten(kept)

    @abstractmethod
    async def _list(self) -> list[Json]:
        """Read all of them."""

    @abstractmethod
    async def _send(self, name: str, uid: str, status: Json) -> str:
        """Store this whole status of one of them; its version after it."""

    def _observed(self, kept: Kept, status: Mapping[str, Any], *, new: bool) -> None:
        """What follows from an object that was observed with this status, for the first time or again."""

    def _spec_changed(self) -> None:
        """What follows from another spec, or from another fault of one."""

    def _forgotten(self, kept: Kept) -> None:
        """What follows from the end of an object."""

"""The PerseusJobs and ServingPools of the cluster as they were observed last, with only what is used of them, and how
many of a namespace are served.

A tenant may make any number of PerseusJobs, and fill the annotations and labels of each. So of a body only the fields
that are read are kept, and of a namespace the oldest jobs are served, up to a budget. As many more wait for a place;
what is beyond that is not kept at all, and is heard of again when it is edited or the operator starts again. A
ResourceQuota on ``count/perseusjobs.perseus.energy`` refuses such jobs before they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from perseus_core import keys
from perseus_operator.classes.pool_owners import MOST_OWNERS
from perseus_operator.objects.values import JobRef, Json

_METADATA: Final = (
    "namespace",
    "name",
    "uid",
    "generation",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
)
_ANNOTATIONS: Final = (keys.ANNOTATION_STRAGGLER, keys.ANNOTATION_PLANNED_SLOWDOWN, keys.ANNOTATION_TRACE)
_MOST_ANNOTATION: Final = 32_768
"""Characters of an annotation that is read; a longer one is invalid, and so is what is kept of it."""
_MOST_LABELS: Final = 16_384
"""Characters of all labels; of more, only the operator's own are kept."""
_MOST_OWNERS: Final = 16_384
"""Characters of a pool's latest owners; of more, none is kept."""


def used_of(body: Mapping[str, Any], kind: str = keys.KIND) -> Json:
    """What is used of an object of a kind as the API server sends it."""
    metadata = body["metadata"]
    labels, annotations = dict(metadata.get("labels") or {}), metadata.get("annotations") or {}
    if sum(len(key) + len(value) for key, value in labels.items()) > _MOST_LABELS:
        labels = {key: labels[key] for key in (keys.LABEL_CLASS, keys.LABEL_MODEL) if key in labels}
    kept: Json = {key: metadata[key] for key in _METADATA if key in metadata}
    kept["labels"] = labels
    kept["annotations"] = {key: annotations[key][:_MOST_ANNOTATION] for key in _ANNOTATIONS if key in annotations}
    if kind == keys.POOL_KIND:
        owners = list(metadata.get("ownerReferences") or ())[-MOST_OWNERS:]
        kept["ownerReferences"] = owners if len(str(owners)) <= _MOST_OWNERS else []
    used: Json = {"kind": kind, "metadata": kept}
    for part in ("spec", "status"):
        if body.get(part) is not None:
            used[part] = body[part]
    return used


def ref_of(body: Mapping[str, Any], kind: str = "") -> JobRef:
    """Name an object; ``kind``: its own, where the API server does not send it along."""
    metadata = body["metadata"]
    return JobRef(metadata["namespace"], metadata["name"], metadata["uid"], kind or body["kind"])


class KnownJobs:
    """PerseusJobs and ServingPools by UID; a place of a namespace's budget is for either."""

    def __init__(self, most_of_namespace: int) -> None:
        """``most_of_namespace``: how many are served of one namespace."""
        self.most_served = most_of_namespace
        self.most_kept = 2 * most_of_namespace
        self._bodies: dict[str, Json] = {}
        self._places: dict[str, list[tuple[str, str]]] = {}
        """By namespace: creation and UID of its jobs, the oldest first."""
        self._named: dict[tuple[str, str, str], str] = {}
        """UID by namespace, name and kind."""
        self._served: dict[str, frozenset[str]] = {}
        """Of the namespaces with more jobs than are served, which are."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._bodies

    def __len__(self) -> int:
        return len(self._bodies)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bodies)

    def body(self, uid: str) -> Json:
        """What is kept of a job."""
        return self._bodies[uid]

    def serves(self, uid: str) -> bool:
        """Whether a job is within the budget of its namespace."""
        body = self._bodies.get(uid)
        if body is None:
            return False
        chosen = self._served.get(body["metadata"]["namespace"])
        return chosen is None or uid in chosen

    def served(self) -> Iterator[tuple[str, Json]]:
        """UID and body of every job within its namespace's budget."""
        return ((uid, body) for uid, body in self._bodies.items() if self.serves(uid))

    def named(self, namespace: str, name: str) -> str:
        """UID of the object whose pods opt in with this name: the PerseusJob, else the ServingPool; empty: none."""
        kinds = keys.KIND, keys.POOL_KIND
        return next((uid for kind in kinds if (uid := self._named.get((namespace, name, kind), ""))), "")

    def pool(self, namespace: str, name: str) -> Json | None:
        """What is kept of a ServingPool; None: there is none, or none that is served."""
        uid = self._named.get((namespace, name, keys.POOL_KIND), "")
        return self._bodies[uid] if self.serves(uid) else None

    def same_name(self, namespace: str, name: str) -> set[str]:
        """UIDs of the objects of this name, of either kind."""
        kinds = keys.KIND, keys.POOL_KIND
        return {uid for kind in kinds if (uid := self._named.get((namespace, name, kind), ""))}

    def of_kind(self, kind: str) -> dict[tuple[str, str], Json]:
        """What is kept of the objects of one kind, by namespace and name."""
        bodies = (body for body in self._bodies.values() if body["kind"] == kind)
        return {(body["metadata"]["namespace"], body["metadata"]["name"]): body for body in bodies}

    def is_full(self, namespace: str) -> bool:
        """Whether no more jobs of a namespace are kept."""
        return len(self._places.get(namespace, ())) >= self.most_kept

    def of_namespace(self, namespace: str) -> list[str]:
        """UIDs of its jobs, the oldest first."""
        return [uid for _, uid in self._places.get(namespace, ())]

    def observe(self, body: Mapping[str, Any], kind: str = keys.KIND) -> bool:
        """Take in an object of a kind as it is now; whether that changes which of its namespace are served."""
        used = used_of(body, kind)
        metadata = used["metadata"]
        uid, namespace = metadata["uid"], metadata["namespace"]
        if uid in self._bodies:
            self._bodies[uid] = used
            return False
        places = self._places.setdefault(namespace, [])
        places.append((metadata.get("creationTimestamp") or "", uid))
        places.sort()
        self._bodies[uid] = used
        self._named[namespace, metadata["name"], kind] = uid
        for _, youngest in places[self.most_kept :]:
            self._drop(youngest)
        del places[self.most_kept :]
        return self._choose(namespace)

    def forget(self, uid: str) -> bool:
        """A job does not exist any more; whether that changes which others of its namespace are served."""
        if uid not in self._bodies:
            return False
        namespace = self._drop(uid)["namespace"]
        places = self._places[namespace] = [place for place in self._places[namespace] if place[1] != uid]
        if not places:
            del self._places[namespace]
        return self._choose(namespace)

    def _drop(self, uid: str) -> Json:
        """Returns its metadata."""
        body = self._bodies.pop(uid)
        metadata: Json = body["metadata"]
        named = metadata["namespace"], metadata["name"], body["kind"]
        if self._named.get(named) == uid:
            del self._named[named]
        return metadata

    def _choose(self, namespace: str) -> bool:
        before, places = self._served.pop(namespace, None), self._places.get(namespace, [])
        if len(places) > self.most_served:
            self._served[namespace] = frozenset(uid for _, uid in places[: self.most_served])
        return self._served.get(namespace) != before

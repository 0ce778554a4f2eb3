"""The PerseusJobs of the cluster as they were observed last, with only what is used of them, and how many of a
namespace are served.

A tenant may make any number of PerseusJobs, and fill the annotations and labels of each. So of a body only the fields
that are read are kept, and of a namespace the oldest jobs are served, up to a budget. As many more wait for a place;
what is beyond that is not kept at all, and is heard of again when it is edited or the operator starts again. A
ResourceQuota on ``count/perseusjobs.perseus.energy`` refuses such jobs before they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from perseus_operator.objects import Json
from perseus_proto import keys

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


def used_of(body: Mapping[str, Any]) -> Json:
    """What is used of a PerseusJob as the API server sends it."""
    metadata = body["metadata"]
    labels, annotations = dict(metadata.get("labels") or {}), metadata.get("annotations") or {}
    if sum(len(key) + len(value) for key, value in labels.items()) > _MOST_LABELS:
        labels = {key: labels[key] for key in (keys.LABEL_CLASS,) if key in labels}
    kept: Json = {key: metadata[key] for key in _METADATA if key in metadata}
    kept["labels"] = labels
    kept["annotations"] = {key: annotations[key][:_MOST_ANNOTATION] for key in _ANNOTATIONS if key in annotations}
    used: Json = {"metadata": kept}
    for part in ("spec", "status"):
        if body.get(part) is not None:
            used[part] = body[part]
    return used


class KnownJobs:
    """PerseusJobs by UID."""

    def __init__(self, most_of_namespace: int) -> None:
        """``most_of_namespace``: how many are served of one namespace."""
        self._most = most_of_namespace
        self._bodies: dict[str, Json] = {}
        self._places: dict[str, list[tuple[str, str]]] = {}
        """By namespace: creation and UID of its jobs, the oldest first."""
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

    def of_namespace(self, namespace: str) -> list[str]:
        """UIDs of its jobs, the oldest first."""
        return [uid for _, uid in self._places.get(namespace, ())]

    def observe(self, body: Mapping[str, Any]) -> bool:
        """Take in a job as it is now; whether that changes which jobs of its namespace are served."""
        used = used_of(body)
        metadata = used["metadata"]
        uid, namespace = metadata["uid"], metadata["namespace"]
        if uid in self._bodies:
            self._bodies[uid] = used
            return False
        places = self._places.setdefault(namespace, [])
        places.append((metadata.get("creationTimestamp") or "", uid))
        places.sort()
        self._bodies[uid] = used
        for _, youngest in places[2 * self._most :]:
            del self._bodies[youngest]
        del places[2 * self._most :]
        return self._choose(namespace)

    def forget(self, uid: str) -> bool:
        """A job does not exist any more; whether that changes which others of its namespace are served."""
        body = self._bodies.pop(uid, None)
        if body is None:
            return False
        namespace = body["metadata"]["namespace"]
        places = self._places[namespace] = [place for place in self._places[namespace] if place[1] != uid]
        if not places:
            del self._places[namespace]
        return self._choose(namespace)

    def _choose(self, namespace: str) -> bool:
        before, places = self._served.pop(namespace, None), self._places.get(namespace, [])
        if len(places) > self._most:
            self._served[namespace] = frozenset(uid for _, uid in places[: self._most])
        return self._served.get(namespace) != before

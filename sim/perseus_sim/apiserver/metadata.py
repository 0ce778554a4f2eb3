"""What a writer may say in an object's metadata, and what only the server writes there."""

from __future__ import annotations

import re

from perseus_sim.apiserver.catalog import Resource
from perseus_sim.apiserver.errors import BadRequest, Conflict, Invalid, Json, StatusCause

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character"
)
# Names of these may hold other characters, such as colons.
_FREE_NAMES = ("rbac.authorization.k8s.io",)


def checked_name(resource: Resource, metadata: Json) -> str:
    """Return the name of an object to be created.

    Raises:
        Invalid: it has none, or one that its resource may not have.
    """
    name = metadata.get("name")
    if not name or not isinstance(name, str):
        cause = StatusCause("metadata.name", "FieldValueRequired", "Required value: name or generateName is required")
        raise Invalid(resource.kind, resource.group, "", [cause])
    if resource.group not in _FREE_NAMES and (not _NAME.fullmatch(name) or len(name) > 253):
        raise Invalid(resource.kind, resource.group, name, [StatusCause.invalid("metadata.name", name, _NAME_RULE)])
    return name


def check_preconditions(resource: Resource, obj: Json, expected: Json) -> None:
    """Compare an object with what a writer expects of it, in the names of metadata.

    Raises:
        Conflict: the object has another UID or another revision.
    """
    for field in ("uid", "resourceVersion"):
        actual = obj["metadata"][field]
        if expected.get(field) and expected[field] != actual:
            name = obj["metadata"]["name"]
            why = (
                "the object has been modified; please apply your changes to the latest version and try again"
                if field == "resourceVersion"
                else f"Precondition failed: UID in precondition: {expected[field]}, UID in object meta: {actual}"
            )
            raise Conflict(
                f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}',
                name=name,
                group=resource.group,
                kind=resource.plural,
            )


def kept_metadata(resource: Resource, old: Json, new: Json) -> Json:
    """Return the new metadata with what only the server writes taken from the old.

    Raises:
        BadRequest: it names another object.
        Invalid: it adds finalizers to an object that is being deleted.
    """
    if new.get("name", old["name"]) != old["name"] or new.get("namespace", old.get("namespace")) != old.get(
        "namespace"
    ):
        raise BadRequest("the name or namespace of the object does not match the one of the URL")
    metadata = {key: value for key, value in new.items() if value is not None}
    for field in (
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ):
        metadata.pop(field, None)
        if field in old:
            metadata[field] = old[field]
    for field in ("labels", "annotations", "finalizers", "ownerReferences"):
        if not metadata.get(field):
            metadata.pop(field, None)
    added = set(metadata.get("finalizers", ())) - set(old.get("finalizers", ()))
    if old.get("deletionTimestamp") and added:
        rule = f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}"
        raise Invalid(resource.kind, resource.group, old["name"], [StatusCause.forbidden("metadata.finalizers", rule)])
    return metadata


def label_causes(metadata: Json) -> list[StatusCause]:
    """Return what is wrong with labels and annotations."""
    return [
        StatusCause.invalid(f"metadata.{part}", value, "must be a string")
        for part in ("labels", "annotations")
        for value in (metadata.get(part) or {}).values()
        if not isinstance(value, str)
    ]

"""The objects, their revisions and their lifecycle: creation, guarded updates, finalizers, garbage collection.

Called by the handler from one event loop, synchronously, so that every write is atomic and garbage collection has
happened when it returns (a real cluster takes a moment longer). Stored objects are never changed in place: what was
handed out stays as it was. No HTTP here, no patches, no selection of what is shown.
"""

from __future__ import annotations

import copy
import random
import string
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from perseus_sim.apiserver import builtins, schema
from perseus_sim.apiserver.catalog import Catalog, Resource
from perseus_sim.apiserver.errors import AlreadyExists, BadRequest, Forbidden, Invalid, Json
from perseus_sim.apiserver.metadata import check_preconditions, checked_name, kept_metadata, label_causes
from perseus_sim.apiserver.watches import Feed

FOREGROUND = "foregroundDeletion"
_NAMESPACES = "/namespaces"
_INITIAL_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")


class Key(NamedTuple):
    """Where an object is stored; namespace is empty for cluster-wide ones."""

    storage: str
    namespace: str
    name: str


class Store:
    """All objects of the cluster."""

    def __init__(self) -> None:
        self.catalog = Catalog.with_builtins()
        self.revision = 0
        self._objects: defaultdict[str, dict[Key, Json]] = defaultdict(dict)
        self._feeds: defaultdict[str, Feed] = defaultdict(Feed)
        self._keys: dict[str, Key] = {}  # by uid
        self._dependents: defaultdict[str, set[Key]] = defaultdict(set)  # by the owner's uid
        self._emptying: set[Key] = set()
        for name in _INITIAL_NAMESPACES:
            self.create(self.catalog.find("", "v1", "namespaces"), "", {"metadata": {"name": name}})

    # -------------------------------------------------------------------------------------- reading

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """One object.

        Raises:
            NotFound: there is none.
        """
        stored = self._objects[resource.storage].get(Key(resource.storage, namespace, name))
        if stored is None:
            raise resource.not_found(name)
        return stored

    def objects(self, resource: Resource, namespace: str) -> Iterator[Json]:
        """Objects of a namespace, or of all where it is empty, by namespace and name."""
        for key, obj in sorted(self._objects[resource.storage].items()):
            if not namespace or key.namespace == namespace:
                yield obj

    def feed(self, resource: Resource) -> Feed:
        """Changes of the resource's objects."""
        return self._feeds[resource.storage]

    # -------------------------------------------------------------------------------------- writing

    def create(
        self, resource: Resource, namespace: str, obj: Json, *, strict: bool = False, dry_run: bool = False
    ) -> Json:
        """Store a new object.

        Raises:
            AlreadyExists, NotFound (the namespace), Forbidden (it is terminating), BadRequest, Invalid.
        """
        obj = copy.deepcopy(obj)
        metadata = obj.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + "".join(
                random.choices(string.digits + string.ascii_lowercase, k=5)
            )
        name = checked_name(resource, metadata)
        if metadata.get("namespace", namespace) != namespace:
            raise BadRequest("the namespace of the provided object does not match the namespace sent on the request")
        if metadata.get("resourceVersion"):
            raise BadRequest("resourceVersion should not be set on objects to be created")
        self._check_namespace(resource, namespace, name)
        key = Key(resource.storage, namespace, name)
        if key in self._objects[key.storage]:
            message = f'{resource.qualified} "{name}" already exists'
            raise AlreadyExists(message, name=name, group=resource.group, kind=resource.plural)
        now = _now()
        for server_side in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
            metadata.pop(server_side, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now, "generation": 1}
        if namespace:
            metadata["namespace"] = namespace
        if resource.has_status and resource.plural != "nodes":  # a kubelet registers its node with the status
            obj.pop("status", None)
        builtins.prepare_created(resource, obj, now)
        obj = self._accepted(resource, obj, None, strict=strict)
        if not dry_run:
            obj = self._put(key, obj)
            if key.storage == _NAMESPACES:
                account = self.catalog.find("", "v1", "serviceaccounts")
                self.create(account, name, {"metadata": {"name": "default"}})
            self._collect_if_orphaned(key)
        return obj

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Json], Json],
        *,
        subresource: str = "",
        strict: bool = False,
        dry_run: bool = False,
    ) -> Json:
        """Replace an object by what ``change`` makes of it; through ``status`` only its status, otherwise all but its
        status.

        Raises:
            NotFound, Conflict (another revision or another object than the writer saw), BadRequest, Invalid.
        """
        old = self.get(resource, namespace, name)
        new = copy.deepcopy(change(old))
        check_preconditions(resource, old, new.get("metadata") or {})
        if subresource == "status":
            new = (
                {**old, "status": new["status"]} if "status" in new else {k: v for k, v in old.items() if k != "status"}
            )
        elif resource.has_status:
            new.pop("status", None)
            new |= {"status": old["status"]} if "status" in old else {}
        new["metadata"] = kept_metadata(resource, old["metadata"], new.get("metadata") or {})
        builtins.prepare_written(resource, new)
        new = self._accepted(resource, new, old, strict=strict)
        ignored = ("metadata", "status") if resource.has_status else ("metadata",)
        if _without(new, ignored) != _without(old, ignored):
            new["metadata"]["generation"] += 1
        if new == old:
            return old
        if dry_run:
            return new
        key = Key(resource.storage, namespace, name)
        if _is_finished(new):
            return self._remove(key, new)
        new = self._put(key, new)
        self._collect_if_orphaned(key)
        return new

    def delete(
        self, resource: Resource, namespace: str, name: str, *, options: Json | None = None, dry_run: bool = False
    ) -> tuple[Json, bool]:
        """Delete an object, or mark it where finalizers hold it; returns its last state and whether it is gone.

        Raises:
            NotFound, Conflict (a precondition of the options does not hold).
        """
        obj = self.get(resource, namespace, name)
        options = options or {}
        check_preconditions(resource, obj, options.get("preconditions") or {})
        if dry_run:
            return obj, True
        key = Key(resource.storage, namespace, name)
        uid = obj["metadata"]["uid"]
        policy = options.get("propagationPolicy")
        if policy == "Orphan":
            for dependent in tuple(self._dependents[uid]):
                self._drop_owners(dependent, {uid})
        obj = copy.deepcopy(obj)
        metadata = obj["metadata"]
        if policy == "Foreground" and self._blocking_dependents(uid):
            metadata.setdefault("finalizers", []).append(FOREGROUND)
        if not metadata.get("finalizers") and key.storage != _NAMESPACES:
            return self._remove(key, obj), True
        if not metadata.get("deletionTimestamp"):
            metadata |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": 0}
            metadata["generation"] += 1
            if key.storage == _NAMESPACES:
                obj["status"] = {**obj["status"], "phase": "Terminating"}
            obj = self._put(key, obj)
        self._empty(key)
        return self._objects[key.storage].get(key, obj), key not in self._objects[key.storage]

    # --------------------------------------------------------------------------------------- checks

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if not resource.namespaced:
            return
        if not namespace:
            raise BadRequest("an empty namespace may not be set during creation")
        space = self.get(self.catalog.find("", "v1", "namespaces"), "", namespace)
        if space["metadata"].get("deletionTimestamp"):
            message = (
                f'{resource.qualified} "{name}" is forbidden: unable to create new content in namespace {namespace}'
            )
            raise Forbidden(f"{message} because it is being terminated")

    def _accepted(self, resource: Resource, obj: Json, old: Json | None, *, strict: bool) -> Json:
        """The object as it will be stored: pruned, with defaults, and valid."""
        obj = {**obj, "apiVersion": resource.api_version, "kind": resource.kind}
        causes = label_causes(obj["metadata"]) + builtins.broken_rules(resource, obj, old)
        if resource.schema is not None:
            obj, unknown = schema.pruned(obj, resource.schema)
            if unknown and strict:
                raise BadRequest("strict decoding error: " + ", ".join(f'unknown field "{path}"' for path in unknown))
            obj = {key: value for key, value in obj.items() if value is not None}
            obj = schema.defaulted(obj, resource.schema)
            causes += schema.broken_rules(obj, resource.schema)
        if causes:
            raise Invalid(resource.kind, resource.group, obj["metadata"]["name"], causes)
        return obj

    # -------------------------------------------------------------------------- commits and removal

    def _put(self, key: Key, obj: Json) -> Json:
        """Store a new state: the only place where one becomes visible."""
        self.revision += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.revision)}}
        previous = self._objects[key.storage].get(key)
        self._index(key, previous, obj)
        self._objects[key.storage][key] = obj
        if key.storage.endswith(f"/{builtins.CRD}"):
            self.catalog.register(obj)
        self._feeds[key.storage].publish(self.revision, obj, previous, deleted=False)
        return obj

    def _remove(self, key: Key, last: Json) -> Json:
        """Forget an object, then all that only lived for it."""
        self.revision += 1
        last = {**last, "metadata": {**last["metadata"], "resourceVersion": str(self.revision)}}
        previous = self._objects[key.storage].pop(key)
        self._index(key, previous, None)
        if key.storage.endswith(f"/{builtins.CRD}"):
            self.catalog.unregister(last)
        self._feeds[key.storage].publish(self.revision, last, previous, deleted=True)
        self._collect(last)
        return last

    def _index(self, key: Key, old: Json | None, new: Json | None) -> None:
        if old is not None:
            self._keys.pop(old["metadata"]["uid"], None)
            for owner in old["metadata"].get("ownerReferences", ()):
                self._dependents[owner["uid"]].discard(key)
        if new is not None:
            self._keys[new["metadata"]["uid"]] = key
            for owner in new["metadata"].get("ownerReferences", ()):
                self._dependents[owner["uid"]].add(key)

    def _collect(self, gone: Json) -> None:
        """Garbage collection after an object has gone: its dependents, and the owners and containers that waited for
        it.
        """
        uid, namespace = gone["metadata"]["uid"], gone["metadata"].get("namespace")
        for key in tuple(self._dependents.pop(uid, ())):
            self._collect_if_orphaned(key)
        for owner in gone["metadata"].get("ownerReferences", ()):
            waiting = self._keys.get(owner["uid"])
            if waiting is not None and not self._blocking_dependents(owner["uid"]):
                self._finalized(waiting, FOREGROUND)
        if namespace:
            self._empty(Key(_NAMESPACES, "", namespace))
        resource = self.catalog.of_storage(self._storage_of(gone))
        if resource is not None and resource.crd_uid:
            definition = self._keys.get(resource.crd_uid)
            if definition is not None:
                self._empty(definition)

    def _storage_of(self, obj: Json) -> str:
        owner = self.catalog.of_owner(obj["apiVersion"], obj["kind"])
        return owner.storage if owner is not None else ""

    def _collect_if_orphaned(self, key: Key) -> None:
        """Delete an object whose owners are all gone; forget those of several that are."""
        obj = self._objects[key.storage].get(key)
        owners = obj["metadata"].get("ownerReferences", ()) if obj is not None else ()
        absent = {owner["uid"] for owner in owners if owner["uid"] not in self._keys}
        if owners and len(absent) == len(owners):
            self._delete_key(key)
        elif absent:
            self._drop_owners(key, absent)

    def _delete_key(self, key: Key) -> None:
        resource = self.catalog.of_storage(key.storage)
        if resource is not None and key in self._objects[key.storage]:
            self.delete(resource, key.namespace, key.name)

    def _drop_owners(self, key: Key, uids: set[str]) -> None:
        obj = copy.deepcopy(self._objects[key.storage][key])
        metadata = obj["metadata"]
        metadata["ownerReferences"] = [owner for owner in metadata["ownerReferences"] if owner["uid"] not in uids]
        if not metadata["ownerReferences"]:
            del metadata["ownerReferences"]
        self._put(key, obj)

    def _blocking_dependents(self, uid: str) -> list[Key]:
        return [
            key
            for key in self._dependents[uid]
            for owner in self._objects[key.storage][key]["metadata"].get("ownerReferences", ())
            if owner["uid"] == uid and owner.get("blockOwnerDeletion")
        ]

    def _finalized(self, key: Key, finalizer: str) -> None:
        obj = copy.deepcopy(self._objects[key.storage].get(key))
        if obj is None or not obj["metadata"].get("deletionTimestamp"):
            return
        if finalizer not in obj["metadata"].get("finalizers", ()):
            return
        obj["metadata"]["finalizers"].remove(finalizer)
        if _is_finished(obj):
            self._remove(key, obj)
        else:
            self._put(key, obj)

    def _empty(self, key: Key) -> None:
        """Delete what an object marked for deletion holds or owns, and then the object itself if nothing is left."""
        obj = self._objects[key.storage].get(key)
        if obj is None or not obj["metadata"].get("deletionTimestamp") or key in self._emptying:
            return
        self._emptying.add(key)  # the deletions below come back here, once for each of them
        try:
            for inner in self._content(key, obj):
                held = self._objects[inner.storage].get(inner)
                if held is not None and not held["metadata"].get("deletionTimestamp"):
                    self._delete_key(inner)
        finally:
            self._emptying.discard(key)
        if not self._blocking_dependents(obj["metadata"]["uid"]):
            self._finalized(key, FOREGROUND)
        if key in self._objects[key.storage] and not self._content(key, obj):
            if key.storage == _NAMESPACES:
                self._remove(key, obj)
            else:
                self._finalized(key, builtins.CRD_CLEANUP)

    def _content(self, key: Key, obj: Json) -> list[Key]:
        """What goes with an object: all in a namespace, all of a defined kind, all owned in a foreground deletion."""
        if key.storage == _NAMESPACES:
            return [inner for objects in self._objects.values() for inner in objects if inner.namespace == key.name]
        if key.storage.endswith(f"/{builtins.CRD}"):
            return list(self._objects[f"{obj['spec']['group']}/{obj['spec']['names']['plural']}"])
        if FOREGROUND in obj["metadata"].get("finalizers", ()):
            return list(self._dependents[obj["metadata"]["uid"]])
        return []


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _without(obj: Json, fields: tuple[str, ...]) -> Json:
    return {key: value for key, value in obj.items() if key not in (*fields, "apiVersion", "kind")}


def _is_finished(obj: Json) -> bool:
    """Marked for deletion, and held by no finalizer any more."""
    return (
        bool(obj["metadata"].get("deletionTimestamp"))
        and not obj["metadata"].get("finalizers")
        and obj["kind"] != "Namespace"
    )

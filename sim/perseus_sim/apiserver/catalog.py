"""Which resources exist: the built-in ones, as kmock lists them, and those that CustomResourceDefinitions add.

Used by the store (how to treat an object) and by discovery. Versions of one resource share its storage; no versions
are converted into one another beyond their ``apiVersion``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import kmock

from perseus_sim.apiserver.errors import Json, NotFound

_NOT_OBJECTS = ("bindings", "componentstatuses")
_NOT_BUILT_IN = ("gateway.networking.k8s.io", "metrics.k8s.io")
_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Resource:
    """One resource in one version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    singular: str = ""
    list_kind: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = False
    """Status is written through its own subresource only."""
    schema: Json | None = None
    """OpenAPI v3 schema of a custom resource; None for built-in kinds, which are not validated."""
    columns: tuple[Json, ...] = ()
    selectable_fields: tuple[str, ...] = ()
    crd_uid: str = ""

    @property
    def storage(self) -> str:
        """Where all versions of the resource are stored. Events are the same objects in both of their groups."""
        group = "" if self.plural == "events" else self.group
        return f"{group}/{self.plural}"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """``perseusjobs.perseus.energy``, as error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def not_found(self, name: str) -> NotFound:
        return NotFound(f'{self.qualified} "{name}" not found', name=name, group=self.group, kind=self.plural)


@dataclass
class Catalog:
    """The resources served now."""

    _resources: dict[tuple[str, str, str], Resource] = field(default_factory=dict)

    @classmethod
    def with_builtins(cls) -> Catalog:
        """Everything that a bare API server serves and stores as objects."""
        bundled = kmock.ResourcesArray()
        with warnings.catch_warnings():
            # kmock reads its file by a function that Python 3.11 calls deprecated, and later ones no longer do.
            warnings.simplefilter("ignore", DeprecationWarning)
            bundled.load_bundled()
        catalog = cls()
        for key in bundled:
            info = bundled[key]
            group, version, plural = key.group or "", key.version or "", key.plural or ""
            if group in _NOT_BUILT_IN or plural in _NOT_OBJECTS or "list" not in info.verbs:
                continue
            catalog._add(
                Resource(
                    group=group,
                    version=version,
                    plural=plural,
                    kind=info.kind or plural,
                    namespaced=bool(info.namespaced),
                    singular=info.singular or plural,
                    list_kind=f"{info.kind}List",
                    short_names=tuple(sorted(info.shortnames)),
                    categories=tuple(sorted(info.categories)),
                    has_status="status" in info.subresources,
                )
            )
        return catalog

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())

    def _add(self, resource: Resource) -> None:
        self._resources[resource.group, resource.version, resource.plural] = resource

    def find(self, group: str, version: str, plural: str) -> Resource:
        """The resource of a request's path.

        Raises:
            NotFound: no such resource is served.
        """
        resource = self._resources.get((group, version, plural))
        if resource is None:
            raise NotFound.path()
        return resource

    def of_storage(self, storage: str) -> Resource | None:
        """Some version of the resource with this storage."""
        return next((resource for resource in self if resource.storage == storage), None)

    def of_owner(self, api_version: str, kind: str) -> Resource | None:
        """The resource of an owner reference."""
        group = api_version.rpartition("/")[0]
        return next((resource for resource in self if (resource.group, resource.kind) == (group, kind)), None)

    def register(self, crd: Json) -> None:
        """Serve what a CustomResourceDefinition declares, in place of what it declared before."""
        self.unregister(crd)
        spec = crd["spec"]
        names = spec["names"]
        for version in spec["versions"]:
            if not version.get("served"):
                continue
            self._add(
                Resource(
                    group=spec["group"],
                    version=version["name"],
                    plural=names["plural"],
                    kind=names["kind"],
                    namespaced=spec["scope"] == "Namespaced",
                    singular=names.get("singular") or names["kind"].lower(),
                    list_kind=names.get("listKind") or f"{names['kind']}List",
                    short_names=tuple(names.get("shortNames", ())),
                    categories=tuple(names.get("categories", ())),
                    has_status="status" in (version.get("subresources") or {}),
                    schema=(version.get("schema") or {}).get("openAPIV3Schema", {"type": "object"}),
                    columns=tuple(version.get("additionalPrinterColumns", ())),
                    selectable_fields=tuple(
                        entry["jsonPath"].lstrip(".") for entry in version.get("selectableFields", ())
                    ),
                    crd_uid=crd["metadata"]["uid"],
                )
            )

    def unregister(self, crd: Json) -> None:
        """No longer serve what it declares."""
        uid = crd["metadata"]["uid"]
        self._resources = {key: value for key, value in self._resources.items() if value.crd_uid != uid}

    def groups(self) -> dict[str, list[str]]:
        """API groups other than the core and their versions, the preferred one first."""
        groups: dict[str, list[str]] = {}
        for resource in self:
            if resource.group and resource.version not in groups.setdefault(resource.group, []):
                groups[resource.group].append(resource.version)
        return groups

    def api_resources(self, group: str, version: str) -> list[Json]:
        """Entries of the discovery document of one group and version.

        Raises:
            NotFound: it is not served.
        """
        members = [resource for resource in self if (resource.group, resource.version) == (group, version)]
        if not members:
            raise NotFound.path()
        entries: list[Json] = []
        for resource in members:
            entry: dict[str, Any] = {
                "name": resource.plural,
                "singularName": resource.singular,
                "namespaced": resource.namespaced,
                "kind": resource.kind,
                "verbs": list(_VERBS),
            }
            if resource.short_names:
                entry["shortNames"] = list(resource.short_names)
            if resource.categories:
                entry["categories"] = list(resource.categories)
            entries.append(entry)
            if resource.has_status:
                entries.append(
                    {
                        "name": f"{resource.plural}/status",
                        "singularName": "",
                        "namespaced": resource.namespaced,
                        "kind": resource.kind,
                        "verbs": ["get", "patch", "update"],
                    }
                )
        return entries

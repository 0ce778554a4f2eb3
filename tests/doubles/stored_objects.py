"""The operator's stored objects in memory: a ``Kube`` of PerseusProfiles and PerseusFrontiers that can be away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from perseus_operator.errors import KubeConflict, KubeError, KubeNotFound
from perseus_operator.objects.values import ConfigMap, JobRef, Json, StoredObject

T = TypeVar("T")


def stored_object(name: str, spec: Json, status: Json | None = None, *, ours: bool = True) -> StoredObject:
    """An object as it was read."""
    return StoredObject(name, "uid", "1", spec, status or {}, ours)


class StoredObjects:
    """One namespace."""

    def __init__(self) -> None:
        self.config_maps: dict[str, ConfigMap] = {}
        self.profiles: dict[str, StoredObject] = {}
        self.frontiers: dict[str, StoredObject] = {}
        self.named: set[str] = set()
        """Profiles that PerseusJobs name."""
        self.failing: KubeError | None = None
        """What every request raises; None: it is answered."""

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        return self._read(self.config_maps, name)

    async def read_profile(self, namespace: str, name: str) -> StoredObject:
        return self._read(self.profiles, name)

    async def list_profiles(
        self, namespace: str, most: int, *, of_engines: bool = False
    ) -> AsyncIterator[StoredObject]:
        if self.failing:
            raise self.failing
        found_ones = [found for _, found in sorted(self.profiles.items()) if ("serving" in found.spec) is of_engines]
        for found in found_ones[:most]:
            yield found

    async def delete_profile(self, namespace: str, profile: StoredObject) -> None:
        self._read(self.profiles, profile.name)
        del self.profiles[profile.name]

    async def named_profiles(self, namespaces: Iterable[str]) -> set[str]:
        return self.named

    async def read_frontier(self, job: JobRef) -> StoredObject:
        return self._read(self.frontiers, job.name)

    async def write_profile(self, namespace: str, name: str, spec: Json, owner: JobRef | None = None) -> None:
        self._write(self.profiles, name, spec)

    async def write_frontier(self, job: JobRef, spec: Json) -> None:
        self._write(self.frontiers, job.name, spec)

    async def write_calibrations(
        self, namespace: str, name: str, calibrations: Mapping[str, str], config_map: ConfigMap | None
    ) -> None:
        if self.failing:
            raise self.failing
        found = self.profiles.get(name)
        if found is None:
            if config_map is None:
                raise KubeNotFound(name)
            found = stored_object(name, {})
        status = {"calibrations": {**found.status.get("calibrations", {}), **calibrations}}
        self.profiles[name] = replace(found, status=status)

    def _read(self, objects: Mapping[str, T], name: str) -> T:
        if self.failing:
            raise self.failing
        if name not in objects:
            raise KubeNotFound(name)
        return objects[name]

    def _write(self, objects: dict[str, StoredObject], name: str, spec: Json) -> None:
        if self.failing:
            raise self.failing
        found = objects.get(name) or stored_object(name, {})
        if not found.ours:
            raise KubeConflict("not the operator's")
        merged = {key: value for key, value in {**found.spec, **spec}.items() if value is not None}
        objects[name] = replace(found, spec=merged)

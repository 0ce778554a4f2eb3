"""PerseusProfiles and PerseusFrontiers: what operators store. ``kube_interface.Kube`` says what each method does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import kubernetes.aio.client as k8s

from perseus_core import keys
from perseus_operator.clients.kube.requests import ATTEMPTS, MERGE, TIMEOUT_S, KubeRequests
from perseus_operator.errors import KubeConflict, KubeNotFound
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, ConfigMap, JobRef, Json, Owner, StoredObject

_KINDS = {keys.PROFILE_PLURAL: keys.PROFILE_KIND, keys.FRONTIER_PLURAL: keys.FRONTIER_KIND}
_API_VERSION = f"{keys.API_GROUP}/{keys.API_VERSION}"
_PAGE: Final = 4
"""Profiles parsed at once: each may hold a megabyte, and all jobs wait meanwhile."""
_ABOUT: Json = {"field_manager": FIELD_MANAGER, "_request_timeout": TIMEOUT_S}


class ObjectStore(KubeRequests):
    """Reads and writes them."""

    async def read_profile(self, namespace: str, name: str) -> StoredObject:
        """See ``Kube``."""
        return await self._read(keys.PROFILE_PLURAL, namespace, name)

    async def list_profiles(
        self, namespace: str, most: int, *, of_engines: bool = False
    ) -> AsyncIterator[StoredObject]:
        """See ``Kube``."""
        where = keys.API_GROUP, keys.API_VERSION, namespace, keys.PROFILE_PLURAL
        options: dict[str, Any] = {"label_selector": keys.LABEL_SERVING if of_engines else f"!{keys.LABEL_SERVING}"}
        for _ in range(0, most, _PAGE):
            page = await self._request(
                self._custom.list_namespaced_custom_object(*where, limit=_PAGE, _request_timeout=TIMEOUT_S, **options)
            )
            for item in page["items"]:
                yield StoredObject.from_json(item)
            options["_continue"] = page.get("metadata", {}).get("continue")
            if not options["_continue"]:
                return

    async def read_frontier(self, job: JobRef) -> StoredObject:
        """See ``Kube``."""
        return await self._read(keys.FRONTIER_PLURAL, job.namespace, job.name)

    async def write_frontier(self, job: JobRef, spec: Json) -> None:
        """See ``Kube``."""
        metadata: Json = {
            "name": job.name,
            "namespace": job.namespace,
            "labels": {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: job.name},
            "ownerReferences": [_job(job).reference(controller=True)],
        }
        # One of a deleted job of the same name is taken over; it may also disappear at any moment.
        await self._write(keys.FRONTIER_PLURAL, metadata, spec, lambda stored: stored.ours and stored.job == job.name)

    async def write_profile(self, namespace: str, name: str, spec: Json, owner: JobRef | None = None) -> None:
        """See ``Kube``."""
        labels = {MANAGED_BY: FIELD_MANAGER} | ({keys.LABEL_SERVING: "true"} if spec.get("serving") else {})
        metadata: Json = {"name": name, "namespace": namespace, "labels": labels}
        if owner is not None:
            metadata["ownerReferences"] = [_job(owner).reference()]
        await self._write(keys.PROFILE_PLURAL, metadata, spec, lambda stored: stored.ours)

    async def delete_profile(self, namespace: str, profile: StoredObject) -> None:
        """See ``Kube``."""
        where = keys.API_GROUP, keys.API_VERSION, namespace, keys.PROFILE_PLURAL, profile.name
        only = k8s.V1Preconditions(uid=profile.uid, resource_version=profile.version)
        await self._request(
            self._custom.delete_namespaced_custom_object(
                *where, body=k8s.V1DeleteOptions(preconditions=only), _request_timeout=TIMEOUT_S
            )
        )

    async def write_calibrations(
        self, namespace: str, name: str, calibrations: Mapping[str, str], config_map: ConfigMap | None
    ) -> None:
        """See ``Kube``."""
        body: Json = {"status": {"calibrations": dict(calibrations)}}
        where = keys.API_GROUP, keys.API_VERSION, namespace, keys.PROFILE_PLURAL
        for _ in range(ATTEMPTS):
            try:
                await self._request(
                    self._custom.patch_namespaced_custom_object_status(
                        *where, name, body, _content_type=MERGE, **_ABOUT
                    )
                )
            except KubeNotFound:
                if config_map is None:
                    raise
            else:
                return
            metadata: Json = {
                "name": name,
                "namespace": namespace,
                "labels": {MANAGED_BY: FIELD_MANAGER},
                "ownerReferences": [Owner("v1", "ConfigMap", config_map.name, config_map.uid).reference()],
            }
            with contextlib.suppress(KubeConflict):  # another job was faster
                await self._create(keys.PROFILE_PLURAL, metadata, {})
        raise KubeConflict(
            f"PerseusProfile {namespace}/{name}: created and deleted by others {ATTEMPTS} times in a row"
        )

    async def _write(self, plural: str, metadata: Json, spec: Json, is_own: Callable[[StoredObject], bool]) -> None:
        """Create an object, or merge a spec into the operator's own of this name."""
        namespace, name = metadata["namespace"], metadata["name"]
        for _ in range(ATTEMPTS):
            try:
                stored = await self._read(plural, namespace, name)
            except KubeNotFound:
                with contextlib.suppress(KubeConflict):  # another writer was faster
                    await self._create(plural, metadata, spec)
                    return
                continue
            if not is_own(stored):
                raise KubeConflict(
                    f"{_KINDS[plural]} {namespace}/{name} exists and is not the operator's: rename or delete it"
                )
            # The version that was read: a write in between is a conflict.
            body = {"metadata": {**metadata, "uid": stored.uid, "resourceVersion": stored.version}, "spec": spec}
            where = keys.API_GROUP, keys.API_VERSION, namespace, plural, name
            with contextlib.suppress(KubeConflict, KubeNotFound):
                await self._request(
                    self._custom.patch_namespaced_custom_object(*where, body, _content_type=MERGE, **_ABOUT)
                )
                return
        raise KubeConflict(f"{_KINDS[plural]} {namespace}/{name}: changed by others {ATTEMPTS} times in a row")

    async def _read(self, plural: str, namespace: str, name: str) -> StoredObject:
        where = keys.API_GROUP, keys.API_VERSION, namespace, plural, name
        answer = await self._request(self._custom.get_namespaced_custom_object(*where, _request_timeout=TIMEOUT_S))
        return StoredObject.from_json(answer)

    async def _create(self, plural: str, metadata: Json, spec: Json) -> None:
        # A spec is merged: what is None is absent.
        given = {key: value for key, value in spec.items() if value is not None}
        body: Json = {"apiVersion": _API_VERSION, "kind": _KINDS[plural], "metadata": metadata, "spec": given}
        where = keys.API_GROUP, keys.API_VERSION, metadata["namespace"], plural
        await self._request(self._custom.create_namespaced_custom_object(*where, body, **_ABOUT))


def _job(job: JobRef) -> Owner:
    return Owner(_API_VERSION, keys.KIND, job.name, job.uid)

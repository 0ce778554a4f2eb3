"""The operator's client of the Kubernetes API: the only module of the operator that imports the official client.

kopf watches objects; everything that the operator reads or writes itself goes through here. ``Kube`` is the interface,
which tests implement with doubles; ``KubeClient`` calls the API server. Errors become those of ``errors``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final, Protocol

import aiohttp
import kubernetes.aio.client as k8s
import kubernetes.aio.config as k8s_config

from perseus_operator.errors import (
    KubeConflict,
    KubeError,
    KubeForbidden,
    KubeNotFound,
    KubeUnavailable,
)
from perseus_operator.formatting import stamp
from perseus_operator.objects import FIELD_MANAGER, MANAGED_BY, ConfigMap, JobRef, Json, Pod
from perseus_operator.planning.workloads import asks_for_gpu, containers_of
from perseus_proto import keys

_config: Any = k8s_config  # its functions carry no types
EPOCH_CONFIG_MAP: Final = "perseus-epoch"
_EPOCH_KEY: Final = "epoch"
_TIMEOUT_S: Final = 15.0
_MERGE: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"
_ATTEMPTS: Final = 20
_AT_ONCE: Final = 16
"""Requests under way: hundreds of jobs that all write at once, after a restart, would time each other out."""
_PAGE: Final = 500
"""Pods in one answer: some MiB, read in some ten milliseconds."""


class Kube(Protocol):
    """What the operator requests from the API server.

    Every method raises ``KubeError`` or a subclass if the API server does not do it: ``KubeUnavailable`` may be tried
    again, ``KubeForbidden`` is a missing right.
    """

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        """Read a ConfigMap.

        Raises:
            KubeNotFound: there is none.
            KubeError: the API server did not answer, or ``binaryData`` is not base64.
        """
        ...

    async def write_owned_config_map(self, owner: JobRef, config_map: ConfigMap) -> None:
        """Create a ConfigMap, or replace the operator's own of this name; it is garbage-collected with its PerseusJob.

        Args:
            owner: the PerseusJob; the ConfigMap is in its namespace.
            config_map: name and data.

        Raises:
            KubeConflict: the ConfigMap of this name is not the operator's, or was changed by another writer again and
                again.
        """
        ...

    async def write_beside(self, namespace: str, owner: ConfigMap | None, config_map: ConfigMap) -> None:
        """Create a ConfigMap, or add its keys to the one of this name.

        Args:
            namespace: of the ConfigMap.
            owner: the ConfigMap that it is garbage-collected with; None: it is never garbage-collected.
            config_map: name and text data; binary data is not written.

        Raises:
            KubeConflict: the object of this name is not the operator's, or another writer changed it in between.
        """
        ...

    async def write_status(self, job: JobRef, status: Json) -> str:
        """Replace the whole status of a PerseusJob.

        Returns:
            The object's resource version after the write.

        Raises:
            KubeNotFound: the job was deleted.
        """
        ...

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        """Set annotations of a PerseusJob.

        Args:
            job: whose annotations these are.
            annotations: by key; None removes the annotation.
            version: the resource version that the write requires; None: any.

        Returns:
            The object's resource version after the write.

        Raises:
            KubeConflict: the object is no longer at ``version``.
            KubeNotFound: the job was deleted.
        """
        ...

    async def post_event(self, job: JobRef, *, kind: str, reason: str, message: str) -> None:
        """Post an event on a PerseusJob; ``kind`` is Normal or Warning."""
        ...

    async def agent_addresses(self, namespace: str) -> dict[str, str]:
        """Return host:port by node name, of every agent whose pod has an address."""
        ...

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        """List the opted-in pods that are bound to a node and have not ended.

        Args:
            namespaces: to look in; empty: all.
        """
        ...


class KubeClient:
    """``Kube`` by the official client. It must be created in the event loop that uses it."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._core = k8s.CoreV1Api(api)
        self._custom = k8s.CustomObjectsApi(api)
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    @classmethod
    async def connect(cls) -> KubeClient:
        """Connect with the service account of this pod, or else with the kubeconfig.

        Raises:
            KubeUnavailable: there is neither.
        """
        configuration = k8s.Configuration()
        try:
            _config.load_incluster_config(client_configuration=configuration)
        except _config.ConfigException:
            try:
                await _config.load_kube_config(client_configuration=configuration)
            except _config.ConfigException as error:
                raise KubeUnavailable(f"neither a service account nor a usable kubeconfig: {error}") from error
        return cls(k8s.ApiClient(configuration))

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        """See ``Kube``."""
        found = await self._request(self._core.read_namespaced_config_map(name, namespace, _request_timeout=_TIMEOUT_S))
        return ConfigMap.from_json(self._api.sanitize_for_serialization(found))

    async def write_owned_config_map(self, owner: JobRef, config_map: ConfigMap) -> None:
        """See ``Kube``."""
        body: Any = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": config_map.name,
                "namespace": owner.namespace,
                "labels": {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: owner.name},
                "ownerReferences": [
                    {
                        "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
                        "kind": keys.KIND,
                        "name": owner.name,
                        "uid": owner.uid,
                        "controller": True,
                        "blockOwnerDeletion": False,
                    }
                ],
            },
            "data": dict(config_map.data),
            "binaryData": {key: base64.b64encode(data).decode() for key, data in config_map.binary.items()},
        }
        about: Json = {"field_manager": FIELD_MANAGER, "_request_timeout": _TIMEOUT_S}
        for _ in range(_ATTEMPTS):
            try:
                await self._request(self._core.create_namespaced_config_map(owner.namespace, body, **about))
                return
            except KubeConflict:
                # It exists. If it belongs to a deleted job of the same name, it may disappear at any moment.
                with contextlib.suppress(KubeNotFound):
                    body["metadata"]["resourceVersion"] = await self._own_version(owner, config_map.name)
                    with contextlib.suppress(KubeConflict):
                        await self._request(
                            self._core.replace_namespaced_config_map(config_map.name, owner.namespace, body, **about)
                        )
                        return
                body["metadata"].pop("resourceVersion", None)
        raise KubeConflict(
            f"ConfigMap {owner.namespace}/{config_map.name}: created and deleted by others {_ATTEMPTS} times in a row"
        )

    async def _own_version(self, owner: JobRef, name: str) -> str:
        """The version of a ConfigMap that an operator wrote for a job of this name.

        Raises:
            KubeNotFound: there is none.
            KubeConflict: somebody else wrote it.
        """
        there = await self._request(
            self._core.read_namespaced_config_map(name, owner.namespace, _request_timeout=_TIMEOUT_S)
        )
        labels = there.metadata.labels or {}
        if (labels.get(MANAGED_BY), labels.get(keys.LABEL_JOB)) != (FIELD_MANAGER, owner.name):
            raise KubeConflict(f"ConfigMap {owner.namespace}/{name} exists and is not the operator's: rename it")
        return str(there.metadata.resource_version)

    async def write_beside(self, namespace: str, owner: ConfigMap | None, config_map: ConfigMap) -> None:
        """See ``Kube``."""
        metadata: Json = {"name": config_map.name, "namespace": namespace, "labels": {MANAGED_BY: FIELD_MANAGER}}
        if owner is not None:
            metadata["ownerReferences"] = [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": owner.name, "uid": owner.uid}
            ]
        body: Any = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(config_map.data)}
        about: Json = {"field_manager": FIELD_MANAGER, "_request_timeout": _TIMEOUT_S}
        try:
            await self._request(self._core.create_namespaced_config_map(namespace, body, **about))
        except KubeConflict:
            there = await self._request(
                self._core.read_namespaced_config_map(config_map.name, namespace, _request_timeout=_TIMEOUT_S)
            )
            if (there.metadata.labels or {}).get(MANAGED_BY) != FIELD_MANAGER:
                raise KubeConflict(
                    f"ConfigMap {namespace}/{config_map.name} exists and is not the operator's: rename or delete it"
                ) from None
            # The resourceVersion that was read: a write in between is a conflict.
            body["metadata"]["resourceVersion"] = there.metadata.resource_version
            body["data"] = {**(there.data or {}), **config_map.data}
            await self._request(self._core.replace_namespaced_config_map(config_map.name, namespace, body, **about))

    async def write_status(self, job: JobRef, status: Json) -> str:
        """See ``Kube``."""
        return await self._patch(
            self._custom.patch_namespaced_custom_object_status(
                *_custom(job),
                _whole(status, job.uid),
                field_manager=FIELD_MANAGER,
                _content_type=_JSON_PATCH,
                _request_timeout=_TIMEOUT_S,
            )
        )

    async def power_budgets(self) -> list[Json]:
        """List every PowerBudget as JSON; none if its CRD is not installed."""
        resource = (keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL)
        try:
            found = await self._request(self._custom.list_cluster_custom_object(*resource, _request_timeout=_TIMEOUT_S))
        except KubeNotFound:
            return []
        return list(found["items"])

    async def write_budget_status(self, name: str, uid: str, status: Json) -> str:
        """Replace the whole status of a PowerBudget; see ``Kube.write_status``."""
        return await self._patch(
            self._custom.patch_cluster_custom_object_status(
                *(keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL, name),
                _whole(status, uid),
                field_manager=FIELD_MANAGER,
                _content_type=_JSON_PATCH,
                _request_timeout=_TIMEOUT_S,
            )
        )

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        """See ``Kube``."""
        metadata: Json = {"uid": job.uid, "annotations": dict(annotations)}
        if version is not None:
            metadata["resourceVersion"] = version
        return await self._patch(
            self._custom.patch_namespaced_custom_object(
                *_custom(job),
                {"metadata": metadata},
                field_manager=FIELD_MANAGER,
                _content_type=_MERGE,
                _request_timeout=_TIMEOUT_S,
            )
        )

    async def post_event(self, job: JobRef, *, kind: str, reason: str, message: str) -> None:
        """See ``Kube``."""
        now = stamp(time.time())
        body: Any = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{job.name}.", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
                "kind": keys.KIND,
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": f"{keys.API_GROUP}/operator",
            "reportingInstance": FIELD_MANAGER,
        }
        await self._request(
            self._core.create_namespaced_event(
                job.namespace, body, field_manager=FIELD_MANAGER, _request_timeout=_TIMEOUT_S
            )
        )

    async def agent_addresses(self, namespace: str) -> dict[str, str]:
        """See ``Kube``."""
        selector = f"{keys.LABEL_COMPONENT}={keys.COMPONENT_AGENT}"
        found = [address async for pod in self._pods(namespace, selector) if (address := agent_of(pod)) is not None]
        return dict(found)

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        """See ``Kube``."""
        found: list[Pod] = []
        for namespace in list(namespaces) or [""]:
            found += [pod async for raw in self._pods(namespace, keys.LABEL_JOB) if (pod := pod_of(raw)) is not None]
        return found

    async def _pods(self, namespace: str, selector: str) -> AsyncIterator[Json]:
        """Pods as JSON, page by page. The client's models cost a millisecond for each, and all jobs wait meanwhile."""
        options: Json = {"label_selector": selector, "limit": _PAGE, "_request_timeout": _TIMEOUT_S}
        while True:
            asked = (
                self._core.list_namespaced_pod_without_preload_content(namespace, **options)
                if namespace
                else self._core.list_pod_for_all_namespaces_without_preload_content(**options)
            )
            page = await self._request(_read(asked))
            for pod in page["items"]:
                yield pod
            options["_continue"] = page.get("metadata", {}).get("continue")
            if not options["_continue"]:
                return

    async def next_epoch(self, namespace: str) -> int:
        """Draw a number larger than any drawn before: a counter in a ConfigMap, compared and swapped.

        Raises:
            KubeError: no answer, or lost every race.
        """
        for _ in range(_ATTEMPTS):
            try:
                return await self._draw_epoch(namespace)
            except KubeConflict:
                await asyncio.sleep(0.05)
        raise KubeConflict(f"ConfigMap {namespace}/{EPOCH_CONFIG_MAP}: changed by others {_ATTEMPTS} times in a row")

    async def newest_epoch(self, namespace: str) -> int:
        """The last one drawn, by whomever; 0: none is known any more."""
        try:
            found = await self._request(
                self._core.read_namespaced_config_map(EPOCH_CONFIG_MAP, namespace, _request_timeout=_TIMEOUT_S)
            )
        except KubeNotFound:
            return 0
        return _epoch_in(found, namespace)

    async def _draw_epoch(self, namespace: str) -> int:
        try:
            found = await self._request(
                self._core.read_namespaced_config_map(EPOCH_CONFIG_MAP, namespace, _request_timeout=_TIMEOUT_S)
            )
        except KubeNotFound:
            body: Any = {
                "metadata": {
                    "name": EPOCH_CONFIG_MAP,
                    "namespace": namespace,
                    "labels": {"app.kubernetes.io/managed-by": FIELD_MANAGER},
                },
                "data": {_EPOCH_KEY: "1"},
            }
            await self._request(self._core.create_namespaced_config_map(namespace, body, _request_timeout=_TIMEOUT_S))
            return 1
        epoch = _epoch_in(found, namespace) + 1
        found.data = {**found.data, _EPOCH_KEY: str(epoch)}
        # Carries the resourceVersion that was read: a write in between is a conflict.
        await self._request(
            self._core.replace_namespaced_config_map(EPOCH_CONFIG_MAP, namespace, found, _request_timeout=_TIMEOUT_S)
        )
        return epoch

    async def _patch(self, request: Any) -> str:
        return str((await self._request(request))["metadata"]["resourceVersion"])

    async def _request(self, request: Any) -> Any:
        """Await a request. Its deadline begins when it is sent: waiting for a turn does not count."""
        try:
            with contextlib.closing(request):  # not started if this task is cancelled while it waits
                async with self._at_once:
                    return await request
        except k8s.ApiException as error:
            raise _translate(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:  # Runtime: the session is closed
            raise KubeUnavailable(f"{type(error).__name__}: {error}") from error


def pod_of(raw: Mapping[str, Any]) -> Pod | None:
    """Parse a training pod; None: not opted in, not bound to a node yet, being deleted, or ended."""
    metadata, spec = raw.get("metadata", {}), raw.get("spec", {})
    labels, node = metadata.get("labels") or {}, spec.get("nodeName")
    over = metadata.get("deletionTimestamp") or raw.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    if not node or keys.LABEL_JOB not in labels or over:
        return None
    return Pod(
        metadata["uid"],
        metadata["namespace"],
        metadata["name"],
        node,
        labels[keys.LABEL_JOB],
        dict(labels),
        owner_uid=next((o["uid"] for o in metadata.get("ownerReferences") or () if o.get("controller")), ""),
        created=metadata.get("creationTimestamp") or "",
        asks_for_gpu=asks_for_gpu(spec),
        containers=containers_of(raw.get("status", {})),
    )


def _whole(status: Json, uid: str) -> list[Json]:
    """Build the patch that replaces a status; the UID excludes a later object of the same name."""
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": "/status", "value": status},
    ]


def _epoch_in(config_map: Any, namespace: str) -> int:
    text = (config_map.data or {}).get(_EPOCH_KEY, "")
    if not text.isdecimal():
        raise KubeError(f"ConfigMap {namespace}/{EPOCH_CONFIG_MAP}: epoch must be a whole number, not {text!r}")
    return int(text)


def _custom(job: JobRef) -> tuple[str, str, str, str, str]:
    return keys.API_GROUP, keys.API_VERSION, job.namespace, keys.PLURAL, job.name


def agent_of(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Parse an agent's pod: node and host:port; None: it has no address yet, or is being deleted."""
    spec, address = raw.get("spec", {}), raw.get("status", {}).get("podIP")
    ports = [port for container in spec.get("containers", ()) for port in container.get("ports") or ()]
    port = next((p["containerPort"] for p in ports if p.get("name") == keys.AGENT_GRPC_PORT_NAME), None)
    if not spec.get("nodeName") or not address or not port or raw.get("metadata", {}).get("deletionTimestamp"):
        return None
    return spec["nodeName"], f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


async def _read(request: Any) -> Any:
    """Parse the JSON of a response that the client has not read."""
    async with await request as answer:
        text = await answer.read()
        if answer.status != 200:
            error = k8s.ApiException(status=answer.status, reason=answer.reason)
            error.body = text.decode(errors="replace")
            raise error
        return json.loads(text)


def _translate(error: Any) -> KubeError:
    message = f"{error.status} {error.reason}: {str(error.body or '')[:300]}"
    known: dict[int, type[KubeError]] = {404: KubeNotFound, 409: KubeConflict, 401: KubeForbidden, 403: KubeForbidden}
    if error.status in known:
        return known[error.status](message)
    # 0: the client failed before an answer came.
    return (KubeUnavailable if error.status in (0, 429) or error.status >= 500 else KubeError)(message)

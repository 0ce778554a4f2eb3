"""The operator's client of the Kubernetes API.

kopf watches objects; everything that the operator reads or writes itself goes through ``KubeClient``, which implements
``kube_interface.Kube``.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import kubernetes.aio.client as k8s

from perseus_operator.clients.epoch_counter import EpochCounter
from perseus_operator.clients.kube_requests import MERGE, TIMEOUT_S
from perseus_operator.clients.object_store import ObjectStore
from perseus_operator.clients.pods import agent_of, pod_of
from perseus_operator.errors import KubeNotFound
from perseus_operator.formatting import stamp
from perseus_operator.objects import FIELD_MANAGER, ConfigMap, JobRef, Json, Pod
from perseus_proto import keys

_JSON_PATCH: Final = "application/json-patch+json"
_PAGE: Final = 500
"""Pods in one answer: some MiB, read in some ten milliseconds."""
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class KubeClient(ObjectStore, EpochCounter):
    """``Kube`` by the official client."""

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        """See ``Kube``."""
        found = await self._request(self._core.read_namespaced_config_map(name, namespace, _request_timeout=TIMEOUT_S))
        return ConfigMap.from_json(self._api.sanitize_for_serialization(found))

    async def write_status(self, job: JobRef, status: Json) -> str:
        """See ``Kube``."""
        return await self._patch(
            self._custom.patch_namespaced_custom_object_status(
                *_custom(job),
                _whole(status, job.uid),
                field_manager=FIELD_MANAGER,
                _content_type=_JSON_PATCH,
                _request_timeout=TIMEOUT_S,
            )
        )

    async def power_budgets(self) -> list[Json]:
        """List every PowerBudget as JSON; none if its CRD is not installed."""
        resource = (keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL)
        try:
            found = await self._request(self._custom.list_cluster_custom_object(*resource, _request_timeout=TIMEOUT_S))
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
                _request_timeout=TIMEOUT_S,
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
                _content_type=MERGE,
                _request_timeout=TIMEOUT_S,
            )
        )

    async def delete_job(self, job: JobRef) -> None:
        """See ``Kube``."""
        body = k8s.V1DeleteOptions(preconditions=k8s.V1Preconditions(uid=job.uid), propagation_policy="Background")
        await self._request(
            self._custom.delete_namespaced_custom_object(*_custom(job), body=body, _request_timeout=TIMEOUT_S)
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
                job.namespace, body, field_manager=FIELD_MANAGER, _request_timeout=TIMEOUT_S
            )
        )

    async def job_uids(self, namespaces: Iterable[str]) -> set[str]:
        """See ``Kube``."""
        group = (keys.API_GROUP, keys.API_VERSION)
        found: set[str] = set()
        for namespace in list(namespaces) or [""]:
            options: Json = {"_headers": {"Accept": _METADATA_ONLY}, "_request_timeout": TIMEOUT_S}
            asked = (
                self._custom.list_namespaced_custom_object(*group, namespace, keys.PLURAL, **options)
                if namespace
                else self._custom.list_cluster_custom_object(*group, keys.PLURAL, **options)
            )
            found |= {item["metadata"]["uid"] for item in (await self._request(asked))["items"]}
        return found

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
        options: Json = {"label_selector": selector, "limit": _PAGE, "_request_timeout": TIMEOUT_S}
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


def _whole(status: Json, uid: str) -> list[Json]:
    """Build the patch that replaces a status; the UID excludes a later object of the same name."""
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": "/status", "value": status},
    ]


def _custom(job: JobRef) -> tuple[str, str, str, str, str]:
    return keys.API_GROUP, keys.API_VERSION, job.namespace, keys.PLURAL, job.name


async def _read(request: Any) -> Any:
    """Parse the JSON of a response that the client has not read."""
    async with await request as answer:
        text = await answer.read()
        if answer.status != 200:
            error = k8s.ApiException(status=answer.status, reason=answer.reason)
            error.body = text.decode(errors="replace")
            raise error
        return json.loads(text)

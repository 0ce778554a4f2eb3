"""The operator's client of the Kubernetes API.

kopf watches objects; everything that the operator reads or writes itself goes through ``KubeClient``, which implements
``kube_interface.Kube``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final

import aiohttp
import kubernetes.aio.client as k8s

from perseus_core import keys
from perseus_operator.clients.kube.access_reviews import AccessReviews
from perseus_operator.clients.kube.interface import AgentPods
from perseus_operator.clients.kube.object_store import ObjectStore
from perseus_operator.clients.kube.pods import agent_of, pod_of
from perseus_operator.clients.kube.requests import (
    MERGE,
    TIMEOUT_S,
    checked,
    read_json,
    read_sized_json,
    translated,
    unavailable,
)
from perseus_operator.errors import KubeNotFound, KubeUnavailable
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, ConfigMap, JobRef, Json, Owner, Pod, PodGroup

_JSON_PATCH: Final = "application/json-patch+json"
_WATCH_S: Final = 60
"""Each watch lasts this long: one on a connection that is silently lost is noticed by then."""
_FIRST_PAGE, _LEAST_PAGE, _LARGEST_PAGE = 50, 10, 500
"""Pods in one answer. The next has as many as make `_PAGE_BYTES` of pods like those: each may have a quarter of a MiB
of annotations, and all jobs wait while it is parsed."""
_PAGE_BYTES: Final = 2 << 20
"""Parsed in some ten milliseconds."""
_MOST_SLICES: Final = 32
"""Of a node that are read: a driver publishes a node's devices in one or a few."""
_MOST_AUTOSCALERS: Final = 500
"""Of a namespace that are read: one for a workload."""
_CLUSTER_EVENTS: Final = "default"
"""Namespace of events about objects that have none: the API server takes them in no other."""
_POD_GROUP_VERSIONS: Final = {
    "scheduling.k8s.io": ("v1beta1", "v1alpha2"),
    "scheduling.x-k8s.io": ("v1alpha1",),
}
"""Of Kubernetes 1.37 and 1.36, and of the scheduler plugins: the newest first."""
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class KubeClient(ObjectStore, AccessReviews):
    """``Kube`` by the official client."""

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        """See ``Kube``."""
        answer = await self._request(self._core.read_namespaced_config_map(name, namespace, _request_timeout=TIMEOUT_S))
        return ConfigMap.from_json(self._api.sanitize_for_serialization(answer))

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
        return await self._listed(keys.BUDGET_PLURAL)

    async def write_budget_status(self, name: str, uid: str, status: Json) -> str:
        """Replace the whole status of a PowerBudget; see ``Kube.write_status``."""
        return await self._write_cluster_status(keys.BUDGET_PLURAL, name, uid, status)

    async def energy_classes(self) -> list[Json]:
        """List every EnergyClass as JSON; none if its CRD is not installed."""
        return await self._listed(keys.CLASS_PLURAL)

    async def write_class_status(self, name: str, uid: str, status: Json) -> str:
        """Replace the whole status of an EnergyClass; see ``Kube.write_status``."""
        return await self._write_cluster_status(keys.CLASS_PLURAL, name, uid, status)

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Read the labels of a namespace.

        Raises:
            KubeNotFound: there is none.
        """
        namespace = await self._request(self._core.read_namespace(name, _request_timeout=TIMEOUT_S))
        return namespace.metadata.labels or {}

    async def pod_group(self, namespace: str, group: PodGroup) -> Owner:
        """Read which PodGroup a pod names.

        Raises:
            KubeNotFound: there is none, or the API server does not know the kind.
            KubeForbidden: the operator may not read it.
        """
        refused: KubeNotFound | None = None
        for version in _POD_GROUP_VERSIONS[group.api_group]:
            where = group.api_group, version, namespace, "podgroups", group.name
            try:
                pod_group = await self._request(
                    self._custom.get_namespaced_custom_object(*where, _request_timeout=TIMEOUT_S)
                )
            except KubeNotFound as error:
                refused = error
            else:
                return Owner(f"{group.api_group}/{version}", "PodGroup", group.name, pod_group["metadata"]["uid"])
        assert refused is not None
        raise refused

    async def create_job(self, job: JobRef, labels: Mapping[str, str], spec: Json, owner: Owner) -> None:
        """Create the PerseusJob or ServingPool of a workload.

        Args:
            job: where, and of which kind; it has no UID yet.
            labels: of the object, beside the operator's own.
            spec: of the object.
            owner: with which it is garbage-collected.

        Raises:
            KubeConflict: one of this name exists.
        """
        body: Json = {
            "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
            "kind": job.kind,
            "metadata": {
                "name": job.name,
                "labels": {**labels, MANAGED_BY: FIELD_MANAGER},
                "ownerReferences": [owner.reference()],
            },
            "spec": spec,
        }
        where = keys.API_GROUP, keys.API_VERSION, job.namespace, job.plural
        await self._request(
            self._custom.create_namespaced_custom_object(
                *where, body, field_manager=FIELD_MANAGER, _request_timeout=TIMEOUT_S
            )
        )

    async def set_owners(self, job: JobRef, owners: Sequence[Json], *, version: str) -> str:
        """Replace the ``ownerReferences`` of a PerseusJob or ServingPool.

        Args:
            job: the object.
            owners: all of them.
            version: of the object that they were made of.

        Returns:
            Its version after it.

        Raises:
            KubeConflict: it has another version, or another UID.
        """
        return await self._patch_metadata(job, version, {"ownerReferences": list(owners)})

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        """See ``Kube``."""
        return await self._patch_metadata(job, version, {"annotations": dict(annotations)})

    async def _patch_metadata(self, job: JobRef, version: str | None, changes: Json) -> str:
        metadata = {"uid": job.uid, **({} if version is None else {"resourceVersion": version}), **changes}
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
        about = Owner(f"{keys.API_GROUP}/{keys.API_VERSION}", job.kind, job.name, job.uid)
        await self._post_event(job.namespace, about, kind, reason, message)

    async def post_cluster_event(self, about: Owner, *, kind: str, reason: str, message: str) -> None:
        """Post an event on a cluster-wide object: kubectl describe looks for it in the namespace default."""
        await self._post_event("", about, kind, reason, message)

    async def warn(self, namespace: str, about: Owner, *, reason: str, message: str) -> None:
        """Post a warning on an object of a namespace."""
        await self._post_event(namespace, about, "Warning", reason, message)

    async def _post_event(self, namespace: str, about: Owner, kind: str, reason: str, message: str) -> None:
        now = stamp(time.time())
        involved = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
        body: Any = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{about.name}.", "namespace": namespace or _CLUSTER_EVENTS},
            "involvedObject": {**involved, **({"namespace": namespace} if namespace else {})},
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
                body["metadata"]["namespace"], body, field_manager=FIELD_MANAGER, _request_timeout=TIMEOUT_S
            )
        )

    async def job_uids(self, namespaces: Iterable[str]) -> set[str]:
        """See ``Kube``."""
        namespaces, metadata = list(namespaces), {"Accept": _METADATA_ONLY}
        items = await self._objects(keys.PLURAL, namespaces, _headers=metadata)
        with contextlib.suppress(KubeNotFound):  # installed with an earlier release, whose CRDs have no pools
            items += await self._objects(keys.POOL_PLURAL, namespaces, _headers=metadata)
        return {item["metadata"]["uid"] for item in items}

    async def named_profiles(self, namespaces: Iterable[str]) -> set[str]:
        """See ``Kube``."""
        specs = [item.get("spec") or {} for item in await self._objects(keys.PLURAL, namespaces)]
        references = [(spec.get("profile") or {}).get("profileRef") or {} for spec in specs]
        return {reference["name"] for reference in references if "name" in reference}

    async def _objects(self, plural: str, namespaces: Iterable[str], **options: Any) -> list[Json]:
        """The objects of a kind of ours in these namespaces; none named: all."""
        group, objects = (keys.API_GROUP, keys.API_VERSION), list[Json]()
        for namespace in list(namespaces) or [""]:
            asked = (
                self._custom.list_namespaced_custom_object(
                    *group, namespace, plural, _request_timeout=TIMEOUT_S, **options
                )
                if namespace
                else self._custom.list_cluster_custom_object(*group, plural, _request_timeout=TIMEOUT_S, **options)
            )
            objects += (await self._request(asked))["items"] or ()  # null: a list of metadata that is empty
        return objects

    async def watch_agents(self, namespace: str) -> AsyncIterator[AgentPods]:
        """See ``Kube``."""
        options: Json = {"label_selector": f"{keys.LABEL_COMPONENT}={keys.COMPONENT_AGENT}"}
        agents: dict[str, tuple[str, str]] = {}
        async for page in self._pages(namespace, **options):
            version = page["metadata"]["resourceVersion"]
            agents |= {pod["metadata"]["uid"]: agent for pod in page["items"] if (agent := agent_of(pod))}
        yield agents
        while True:
            async for event in self._events(namespace, version, **options):
                pod = event["object"]
                version, uid = pod["metadata"]["resourceVersion"], pod["metadata"].get("uid", "")
                if event["type"] == "BOOKMARK":  # no pod, but the version from which to go on
                    continue
                agent = None if event["type"] == "DELETED" else agent_of(pod)
                if agents.get(uid) == agent:
                    continue
                agents.pop(uid, None)
                if agent is not None:
                    agents[uid] = agent
                yield agents

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        """See ``Kube``."""
        pods: list[Pod] = []
        for namespace in list(namespaces) or [""]:
            async for page in self._pages(namespace, label_selector=keys.LABEL_JOB):
                pods += [pod for raw in page["items"] if (pod := pod_of(raw)) is not None]
        return pods

    async def autoscalers(self, namespace: str) -> tuple[list[Json], bool]:
        """See ``Kube``."""
        autoscalers, api = list[Json](), k8s.AutoscalingV2Api(self._api)
        token: dict[str, Any] = {}
        for _ in range(0, _MOST_AUTOSCALERS, _FIRST_PAGE):
            asked = api.list_namespaced_horizontal_pod_autoscaler_without_preload_content(
                namespace, limit=_FIRST_PAGE, _request_timeout=TIMEOUT_S, **token
            )
            page = await self._request(read_json(asked))
            autoscalers += page["items"] or ()
            token = {"_continue": page.get("metadata", {}).get("continue")}
            if not token["_continue"]:
                return autoscalers, True
        return autoscalers, False

    async def resource_slices(self, node: str) -> list[Json]:
        """See ``Kube``."""
        asked = k8s.ResourceV1Api(self._api).list_resource_slice_without_preload_content(
            field_selector=f"spec.nodeName={node}", limit=_MOST_SLICES, _request_timeout=TIMEOUT_S
        )
        return list((await self._request(read_json(asked)))["items"] or ())

    async def _listed(self, plural: str) -> list[Json]:
        """Every cluster-wide object of a kind of ours; none if its CRD is not installed."""
        where = keys.API_GROUP, keys.API_VERSION, plural
        try:
            answer = await self._request(self._custom.list_cluster_custom_object(*where, _request_timeout=TIMEOUT_S))
        except KubeNotFound:
            return []
        return list(answer["items"])

    async def _write_cluster_status(self, plural: str, name: str, uid: str, status: Json) -> str:
        return await self._patch(
            self._custom.patch_cluster_custom_object_status(
                *(keys.API_GROUP, keys.API_VERSION, plural, name),
                _whole(status, uid),
                field_manager=FIELD_MANAGER,
                _content_type=_JSON_PATCH,
                _request_timeout=TIMEOUT_S,
            )
        )

    async def _pages(self, namespace: str, **options: Any) -> AsyncIterator[Json]:
        """Lists of pods as JSON, page by page. The client's models cost a millisecond for each, and all jobs wait."""
        options |= {"limit": _FIRST_PAGE, "_request_timeout": TIMEOUT_S}
        while True:
            page, size = await self._request(read_sized_json(self._asked(namespace, options)))
            wanted = len(page["items"]) * _PAGE_BYTES // max(1, size)
            options["limit"] = min(max(wanted, _LEAST_PAGE), _LARGEST_PAGE)
            yield page
            options["_continue"] = page.get("metadata", {}).get("continue")
            if not options["_continue"]:
                return

    async def _events(self, namespace: str, version: str, **options: Any) -> AsyncIterator[Json]:
        """What happens to pods after a version, as JSON, until the server ends the watch, which it does now and then.

        Raises:
            KubeError: the watch broke; 410: the version is too old.
        """
        options |= {"watch": True, "resource_version": version, "allow_watch_bookmarks": True}
        options |= {"timeout_seconds": _WATCH_S, "_request_timeout": _WATCH_S + TIMEOUT_S}
        try:
            async with await self._request(checked(self._asked(namespace, options))) as answer:
                async for line in _lines(answer.content):
                    try:
                        event = json.loads(line)
                    except ValueError as error:
                        raise KubeUnavailable(f"the watch has a line that is no JSON: {error}") from error
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise translated(k8s.ApiException(status=status.get("code", 0), reason=status.get("message")))
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unavailable(error) from error

    def _asked(self, namespace: str, options: Json) -> Any:
        if namespace:
            return self._core.list_namespaced_pod_without_preload_content(namespace, **options)
        return self._core.list_pod_for_all_namespaces_without_preload_content(**options)


def _whole(status: Json, uid: str) -> list[Json]:
    """Build the patch that replaces a status; the UID excludes a later object of the same name."""
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": "/status", "value": status},
    ]


def _custom(job: JobRef) -> tuple[str, str, str, str, str]:
    return keys.API_GROUP, keys.API_VERSION, job.namespace, job.plural, job.name


async def _lines(content: Any) -> AsyncIterator[bytes]:
    """Split a stream into lines of any length."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line

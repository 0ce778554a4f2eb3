"""The plugin's client of the API server: the official synchronous client with the user's kubeconfig.

It is the only module of the plugin that imports ``kubernetes``. Errors become those of ``errors``, with the API
server's own message.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import kubernetes.client as k8s
import kubernetes.config as k8s_config
import urllib3.exceptions

from perseus_core import keys
from perseus_operator.clients.kube.kubeconfig import reading_kubeconfig
from perseus_operator.errors import (
    KubeConflict,
    KubeError,
    KubeForbidden,
    KubeNotFound,
    KubeUnavailable,
    UnusableArgument,
)
from perseus_operator.objects.values import ConfigMap, Json, StoredObject
from perseus_runtime.addresses import parse_url

REQUEST_S: Final = 10.0
COMMAND_S: Final = 30.0
"""How long a command waits for one answer, and for all of them: a healthy API server takes a fraction of a second."""
_ATTEMPTS: Final = 5
_PAGE: Final = 500
_CONFIG_MAP: Final = "/api/v1/namespaces/{namespace}/configmaps/{name}"
_NAMESPACES: Final = "/api/v1/namespaces"
_PODS: Final = "/api/v1/namespaces/{namespace}/pods"
_ALL_PODS: Final = "/api/v1/pods"
_MERGE: Final = "application/merge-patch+json"

T = TypeVar("T")


class KubeReader:
    """Reads what belongs to PerseusJobs and ServingPools, and rewrites annotations, in one context of a kubeconfig."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        """Connect by a kubeconfig.

        Args:
            kubeconfig: the file; None: KUBECONFIG, or ~/.kube/config.
            context: of the kubeconfig; None: the current one.

        Raises:
            UnusableArgument: there is none, or it has no such context.
        """
        loader: Any = k8s_config
        with reading_kubeconfig(loader.ConfigException, kubeconfig):
            contexts, active = loader.list_kube_config_contexts(config_file=kubeconfig)
            if context is not None:
                active = next((entry for entry in contexts if entry["name"] == context), None)
                if active is None:
                    raise UnusableArgument(f"--context: the kubeconfig has no context {context!r}")
            api = loader.new_client_from_config(config_file=kubeconfig, context=context)
            try:
                parse_url(api.configuration.host)
            except ValueError as error:
                raise UnusableArgument(f"no usable kubeconfig: server: {error}") from error
            self.namespace: str = active["context"].get("namespace") or "default"
        api.configuration.retries = 1
        self._api: Any = api
        self._custom: Any = k8s.CustomObjectsApi(api)
        self._end_s = time.monotonic() + COMMAND_S

    def job(self, namespace: str, name: str) -> Json:
        """Read a PerseusJob as it is stored.

        Raises:
            KubeNotFound: there is none.
            KubeError: the API server did not answer.
        """
        return self._one(keys.PLURAL, namespace, name)

    def pool(self, namespace: str, name: str) -> Json:
        """Read a ServingPool as it is stored. Raises like ``job``."""
        return self._one(keys.POOL_PLURAL, namespace, name)

    def jobs(self, namespace: str | None) -> list[Json]:
        """Read all PerseusJobs of a namespace; None: of the cluster.

        Raises:
            KubeNotFound: the cluster has no such definition.
            KubeForbidden: the user may not list them there.
            KubeError: the API server did not answer.
        """
        return self._all(keys.PLURAL, namespace)

    def pools(self, namespace: str | None) -> list[Json]:
        """Read all ServingPools of a namespace; None: of the cluster. Raises like ``jobs``."""
        return self._all(keys.POOL_PLURAL, namespace)

    def pods(self, namespace: str | None, label: str) -> list[Json]:
        """Read pods that carry a label, up to 500.

        Args:
            namespace: of the pods; None: all of the cluster.
            label: alone, or with its value as ``key=value``.

        Raises:
            KubeForbidden: the user may not list them.
            KubeError: the API server did not answer.
        """
        query = {"labelSelector": label, "limit": str(_PAGE)}
        path, names = (_ALL_PODS, {}) if namespace is None else (_PODS, {"namespace": namespace})
        items: list[Json] = self._ask(f"pods {_in(namespace)}", lambda: self._get(path, names, **query))["items"]
        return items

    def workload(self, api_version: str, plural: str, namespace: str, name: str) -> Json:
        """Read what makes pods, such as a Deployment.

        Raises:
            KubeNotFound: there is none.
            KubeForbidden: the user may not read it.
            KubeError: the API server did not answer.
        """
        names = {"namespace": namespace, "name": name}
        path = f"/apis/{api_version}/namespaces/{{namespace}}/{plural}/{{name}}"
        return self._ask(f"{plural}/{name} {_in(namespace)}", lambda: self._get(path, names))

    def config_map(self, namespace: str, name: str) -> ConfigMap:
        """Read a ConfigMap.

        Raises:
            KubeNotFound: there is none.
            KubeError: the API server did not answer, or ``binaryData`` is not base64.
        """
        names = {"namespace": namespace, "name": name}
        answer = self._ask(f"configmaps/{name} {_in(namespace)}", lambda: self._get(_CONFIG_MAP, names))
        return ConfigMap.from_json(answer)

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Read the labels of a namespace.

        Raises:
            KubeNotFound: there is none.
            KubeError: the API server did not answer.
        """
        path = f"{_NAMESPACES}/{{name}}"
        return _labels(self._ask(f"namespaces/{name}", lambda: self._get(path, {"name": name})))

    def namespaces(self, label: str) -> Mapping[str, Mapping[str, str]]:
        """Read the labels, by name, of all namespaces that carry a label.

        Raises:
            KubeForbidden: the user may not list namespaces.
            KubeError: the API server did not answer.
        """
        items = self._ask("namespaces", lambda: self._get(_NAMESPACES, {}, labelSelector=label))["items"]
        return {item["metadata"]["name"]: _labels(item) for item in items}

    def energy_class(self, name: str) -> Json:
        """Read an EnergyClass.

        Raises:
            KubeNotFound: there is none.
            KubeForbidden: the user may not read it: it belongs to the cluster.
            KubeError: the API server did not answer.
        """
        which = keys.API_GROUP, keys.API_VERSION, keys.CLASS_PLURAL, name
        return self._ask(f"{keys.CLASS_PLURAL}/{name}", lambda: self._custom.get_cluster_custom_object(*which))

    def stored(self, plural: str, namespace: str, name: str) -> StoredObject:
        """Read a PerseusProfile or a PerseusFrontier.

        Raises:
            KubeNotFound: there is none.
            KubeError: the API server did not answer.
        """
        return StoredObject.from_json(self._one(plural, namespace, name))

    def edit_annotation(self, namespace: str, name: str, key: str, edit: Callable[[Json, str], str]) -> str:
        """Rewrite one annotation of a PerseusJob; another writer's edit in between is never lost.

        Args:
            namespace: of the PerseusJob.
            name: of the PerseusJob.
            key: of the annotation.
            edit: returns the new text from the job and the present text; called again after every conflict.

        Returns:
            The annotation as it is stored now; empty: it was removed.

        Raises:
            KubeConflict: another writer was faster each of five times.
            KubeError: the API server did not store it.
        """
        for attempt in range(_ATTEMPTS):
            job = self.job(namespace, name)
            metadata = job["metadata"]
            before = (metadata.get("annotations") or {}).get(key, "")
            wanted = edit(job, before)
            if wanted == before:
                return wanted
            body = {
                "metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": {key: wanted or None}},
            }
            try:
                self._ask(
                    f"an edit of {keys.PLURAL}/{name} {_in(namespace)}", partial(self._patch, namespace, name, body)
                )
            except KubeConflict:
                if attempt + 1 == _ATTEMPTS:
                    raise
            else:
                return wanted
        raise AssertionError("the last attempt returns or raises")

    def _one(self, plural: str, namespace: str, name: str) -> Json:
        which = keys.API_GROUP, keys.API_VERSION, namespace, plural, name
        read = partial(self._custom.get_namespaced_custom_object, *which)
        return self._ask(f"{plural}/{name} {_in(namespace)}", read)

    def _all(self, plural: str, namespace: str | None) -> list[Json]:
        if namespace is None:
            pages = partial(self._custom.list_cluster_custom_object, keys.API_GROUP, keys.API_VERSION, plural)
        else:
            there = keys.API_GROUP, keys.API_VERSION, namespace, plural
            pages = partial(self._custom.list_namespaced_custom_object, *there)
        items: list[Json] = []
        more = ""
        while True:
            answer = self._ask(f"{plural} {_in(namespace)}", partial(pages, limit=_PAGE, _continue=more))
            items += answer["items"]
            more = answer["metadata"].get("continue") or ""
            if not more:
                return items

    def _get(self, path: str, names: dict[str, str], **query: str) -> Json:
        """Read the object at a path as JSON: importing the client's CoreV1Api would take half a second."""
        headers, asked = {"Accept": "application/json"}, list(query.items())
        request = self._api.param_serialize(
            "GET", path, names, asked, header_params=headers, auth_settings=["BearerToken"]
        )
        answer = self._api.call_api(*request)
        answer.read()
        document: Json = self._api.response_deserialize(answer, {"200": "object"}).data
        return document

    def _patch(self, namespace: str, name: str, body: Json) -> Any:
        return self._custom.patch_namespaced_custom_object(*_resource(namespace, name), body, _content_type=_MERGE)

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Ask the API server for something; ``what`` is its name in messages.

        In a thread, since no limit of the client holds for names that are looked up and answers that come in drops.
        """
        left_s = self._end_s - time.monotonic()
        answer: Future[T] = Future()
        threading.Thread(target=_answer, args=(answer, call), daemon=True).start()
        try:
            return answer.result(max(0.0, min(REQUEST_S, left_s)))
        except k8s.ApiException as error:
            raise _translate(error) from error
        except TimeoutError:
            limit = f"{REQUEST_S:g} s" if left_s > REQUEST_S else f"the {COMMAND_S:g} s that a command may wait in all"
            raise KubeUnavailable(
                f"the API server did not answer within {limit} when asked for {what}: it or the network is overloaded;"
                " try again, and see whether kubectl get --raw /readyz is as slow"
            ) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cause = getattr(error, "reason", None) or error
            raise KubeUnavailable(f"the API server cannot be reached: {cause}") from error


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except Exception as error:  # noqa: BLE001  # whatever it is, the thread that asked raises it
        answer.set_exception(error)


def _in(namespace: str | None) -> str:
    return "in any namespace" if namespace is None else f"in namespace {namespace}"


def _labels(item: Json) -> Mapping[str, str]:
    return item["metadata"].get("labels") or {}


def _resource(namespace: str, name: str) -> tuple[str, str, str, str, str]:
    return keys.API_GROUP, keys.API_VERSION, namespace, keys.PLURAL, name


def _translate(error: Any) -> KubeError:
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        message = f"{error.status} {error.reason}"
    kinds: dict[int, type[KubeError]] = {404: KubeNotFound, 409: KubeConflict, 401: KubeForbidden, 403: KubeForbidden}
    kind = kinds.get(error.status) or (
        KubeUnavailable if error.status in (0, 429) or error.status >= 500 else KubeError
    )
    return kind(message)

"""HTTP in front of the store: paths, queries, content types, lists, watches, and errors as Kubernetes' Status bodies.

Called by kmock's server core for every request that no declared reaction answers. Nothing about objects is decided
here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import kmock
import yaml
from aiohttp import web

from perseus_sim.apiserver import apply, builtins, discovery, patches, tables
from perseus_sim.apiserver.catalog import Resource
from perseus_sim.apiserver.errors import ApiError, BadRequest, Json, MethodNotAllowed, NotFound, UnsupportedMediaType
from perseus_sim.apiserver.selectors import Predicate, field_selector, label_selector
from perseus_sim.apiserver.store import Store
from perseus_sim.apiserver.watches import Change

_BOOKMARK_EVERY_S = 10.0
_RETURNS_OBJECT_WHEN_DELETED = ("pods", "serviceaccounts", "services", "persistentvolumeclaims", "persistentvolumes")


class ApiServer(kmock.RawHandler):
    """The server as kmock's handler: declared reactions win (faults, in tests), the store answers everything else."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()

    async def __call__(self, raw_request: web.BaseRequest) -> web.StreamResponse:
        # kmock keeps every request for assertions and reads every body as text: only where reactions are declared.
        if self._payloads:
            reaction: web.StreamResponse = await super().__call__(raw_request)
            return reaction
        return await self.serve(raw_request, await raw_request.read())

    async def _handle(self, request: kmock.Request) -> web.StreamResponse:
        try:
            reaction: web.StreamResponse = await super()._handle(request)
        except NotImplementedError:  # what kmock raises where none of the declared reactions matches
            assert request._raw_request is not None
            return await self.serve(request._raw_request, request.body)
        return reaction

    async def serve(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Answer one request; errors become their Status."""
        try:
            parts = [part for part in request.path.split("/") if part]
            if parts and parts[-1] in ("healthz", "livez", "readyz"):
                return web.Response(text="ok")
            call = _parse(self.store, request, parts, body)
            if call is None:
                return web.json_response(discovery.document(self.store.catalog, parts))
            return await call.answer()
        except ApiError as error:
            return web.json_response(error.status(), status=error.code)


def _parse(store: Store, request: web.BaseRequest, parts: list[str], body: bytes) -> _Call | None:
    """The call that a path means; None for documents about the API itself."""
    match parts:
        case ["api", version, first, *rest]:
            group = ""
        case ["apis", group, version, first, *rest]:
            pass
        case _:
            if request.method not in ("GET", "HEAD"):
                raise NotFound.path()
            return None
    namespace = ""
    if first == "namespaces" and len(rest) >= 2 and rest[1] not in ("status", "finalize"):
        namespace, first, *rest = rest
    resource = store.catalog.find(group, version, first)
    if namespace and not resource.namespaced:
        raise NotFound.path()
    name, subresource = (*rest, "", "")[:2]
    if len(rest) > 2 or (subresource and not (subresource == "status" and resource.has_status)):
        raise NotFound.path()
    return _Call(store, request, body, resource, namespace, name, subresource)


@dataclass(frozen=True)
class _Call:
    """One request to one resource."""

    store: Store
    request: web.BaseRequest
    body: bytes
    resource: Resource
    namespace: str
    name: str
    subresource: str

    async def answer(self) -> web.StreamResponse:  # noqa: PLR0911 - one return for each verb
        method = self.request.method
        if method == "GET" and self._flag("watch"):
            return await self._watch()
        if self.resource.namespaced and not self.namespace and (self.name or method != "GET"):
            raise MethodNotAllowed("the server does not allow this method on the requested resource")
        match method, bool(self.name):
            case "GET", True:
                return self._response(self.store.get(self.resource, self.namespace, self.name))
            case "GET", False:
                return self._list()
            case "POST", False:
                return self._response(self._create(self._object()), status=201)
            case "PUT", True:
                return self._response(self._update(self._object()))
            case "PATCH", True:
                return self._patch()
            case "DELETE", True:
                return self._delete()
            case "DELETE", False:
                return self._delete_collection()
        raise MethodNotAllowed("the server does not allow this method on the requested resource")

    # ------------------------------------------------------------------------------- the request

    def _flag(self, name: str) -> bool:
        return self.request.query.get(name, "").lower() in ("true", "1")

    @property
    def _dry_run(self) -> bool:
        return self.request.query.get("dryRun") == "All"

    @property
    def _strict(self) -> bool:
        return self.request.query.get("fieldValidation") == "Strict"

    def _selected(self) -> Predicate:
        query = self.request.query
        labels = label_selector(query.get("labelSelector", ""))
        fields = field_selector(query.get("fieldSelector", ""), self.resource)

        def selected(obj: Json) -> bool:
            metadata = obj["metadata"]
            inside = not self.namespace or metadata.get("namespace") == self.namespace
            named = not self.name or metadata["name"] == self.name
            return inside and named and labels(obj) and fields(obj)

        return selected

    def _document(self) -> Json:
        """The body as an object; empty where there is none."""
        kind = self.request.content_type
        if not self.body:
            return {}
        if kind not in ("application/json", "application/yaml", "application/octet-stream"):
            raise UnsupportedMediaType(f"the body of the request was in an unknown format: {kind}")
        try:
            document = yaml.safe_load(self.body) if kind == "application/yaml" else json.loads(self.body)
        except (ValueError, yaml.YAMLError) as error:
            raise BadRequest(f"couldn't get version/kind; json parse error: {error}") from None
        if not isinstance(document, dict):
            raise BadRequest("couldn't get version/kind; json parse error: the body is not an object")
        return document

    def _object(self) -> Json:
        obj = self._document()
        for field, expected in (("apiVersion", self.resource.api_version), ("kind", self.resource.kind)):
            if obj.get(field, expected) != expected:
                sent = f"{obj.get('kind')} in version {obj.get('apiVersion')!r}"
                raise BadRequest(f"{sent} cannot be handled as a {self.resource.kind}")
        if not isinstance(obj.get("metadata") or {}, dict):
            raise BadRequest("metadata must be an object")
        return obj

    # -------------------------------------------------------------------------------------- writing

    def _create(self, obj: Json) -> Json:
        stored = builtins.stored_form(self.resource, obj)
        return self.store.create(self.resource, self.namespace, stored, strict=self._strict, dry_run=self._dry_run)

    def _update(self, obj: Json) -> Json:
        stored = builtins.stored_form(self.resource, obj)
        return self.store.update(
            self.resource,
            self.namespace,
            self.name,
            lambda _: stored,
            subresource=self.subresource,
            strict=self._strict,
            dry_run=self._dry_run,
        )

    def _patch(self) -> web.Response:
        kind = self.request.content_type
        patch = patches.parse(kind, self.body)
        if kind == patches.STRATEGIC_PATCH and self.resource.schema is not None:
            raise UnsupportedMediaType(
                "the body of the request was in an unknown format - accepted media types include: "
                f"{patches.JSON_PATCH}, {patches.MERGE_PATCH}, {patches.APPLY_PATCH}"
            )
        manager = self.request.query.get("fieldManager", "")
        if kind == patches.APPLY_PATCH and not manager:
            raise BadRequest("fieldManager is required for apply patch")

        def change(old: Json) -> Json:
            shown = builtins.served_form(self.resource, old)
            if kind == patches.JSON_PATCH:
                new = patches.json_patch(shown, patch)
            elif kind == patches.MERGE_PATCH:
                new = patches.merge_patch(shown, patch)
            elif kind == patches.STRATEGIC_PATCH:
                new = patches.strategic_patch(shown, patch)
            else:
                new = apply.applied(shown, patch, manager, self.resource)
            return builtins.stored_form(self.resource, new)

        try:
            result = self.store.update(
                self.resource,
                self.namespace,
                self.name,
                change,
                subresource=self.subresource,
                strict=self._strict,
                dry_run=self._dry_run,
            )
        except NotFound:
            if kind != patches.APPLY_PATCH or self.subresource:
                raise
            named = patch | {"metadata": {**(patch.get("metadata") or {}), "name": self.name}}
            return self._response(self._create(apply.applied({}, named, manager, self.resource)), status=201)
        return self._response(result)

    def _delete(self) -> web.Response:
        options = self._document() | {
            key: value for key, value in self.request.query.items() if key == "propagationPolicy"
        }
        obj, gone = self.store.delete(self.resource, self.namespace, self.name, options=options, dry_run=self._dry_run)
        if not gone or self.resource.plural in _RETURNS_OBJECT_WHEN_DELETED:
            return self._response(obj)
        details = {"name": self.name, "kind": self.resource.plural, "uid": obj["metadata"]["uid"]}
        if self.resource.group:
            details["group"] = self.resource.group
        return web.json_response(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        )

    def _delete_collection(self) -> web.Response:
        selected = self._selected()
        doomed = [obj for obj in self.store.objects(self.resource, self.namespace) if selected(obj)]
        for obj in doomed:
            metadata = obj["metadata"]
            self.store.delete(
                self.resource,
                metadata.get("namespace", ""),
                metadata["name"],
                options=self._document(),
                dry_run=self._dry_run,
            )
        return web.json_response(self._as_list(doomed))

    # -------------------------------------------------------------------------------------- reading

    @property
    def _form(self) -> str:
        """The form of the answer that the client prefers: Table, PartialObjectMetadata, or the object itself."""
        first = self.request.headers.get("Accept", "").partition(",")[0]
        for form in ("Table", "PartialObjectMetadata"):
            if f"as={form}" in first:
                return form
        return ""

    def _shape(self, obj: Json) -> Json:
        """One object, in the requested form."""
        served = builtins.served_form(self.resource, obj)
        if self._form == "Table":
            # Columns address core events by their stored names.
            include = self.request.query.get("includeObject", "Metadata")
            return tables.table(self.resource, [obj], {"resourceVersion": obj["metadata"]["resourceVersion"]}, include)
        return tables.partial(served) if self._form else served

    def _response(self, obj: Json, status: int = 200) -> web.Response:
        return web.json_response(self._shape(obj), status=status)

    def _as_list(self, objects: Iterable[Json]) -> Json:
        metadata = {"resourceVersion": str(self.store.revision)}
        if self._form == "Table":
            include = self.request.query.get("includeObject", "Metadata")
            return tables.table(self.resource, objects, metadata, include)
        items: list[Json] | None = [builtins.served_form(self.resource, obj) for obj in objects]
        if self._form:
            kind, version = "PartialObjectMetadataList", "meta.k8s.io/v1"
            items = [tables.partial(item) for item in items or ()] or None  # an empty one is null, on a real server too
        else:
            kind, version = self.resource.list_kind, self.resource.api_version
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def _list(self) -> web.Response:
        selected = self._selected()
        return web.json_response(
            self._as_list(obj for obj in self.store.objects(self.resource, self.namespace) if selected(obj))
        )

    async def _watch(self) -> web.StreamResponse:
        query = self.request.query
        selected = self._selected()
        bookmarks = self._flag("allowWatchBookmarks")
        timeout = query.get("timeoutSeconds") or "3600"
        if not timeout.isdigit():
            raise BadRequest(f'strconv.ParseInt: parsing "{timeout}": invalid syntax')
        deadline = time.monotonic() + int(timeout)
        since = query.get("resourceVersion", "")
        if since and not since.isdigit():
            raise BadRequest(f"resourceVersion: Invalid value: {since!r}")
        from_now = since in ("", "0") or self._flag("sendInitialEvents")
        queue = self.store.feed(self.resource).subscribe(
            self.store.revision if from_now else int(since), self.store.revision
        )
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Cache-Control": "no-cache"})
            # What exists now, taken before the first await: later changes are in the queue.
            present = [obj for obj in self.store.objects(self.resource, self.namespace) if from_now and selected(obj)]
            revision = self.store.revision
            await response.prepare(self.request)
            for obj in present:
                await self._send(response, "ADDED", self._shape(obj))
            if self._flag("sendInitialEvents") and bookmarks:
                await self._send(response, "BOOKMARK", self._bookmark(revision, initial_end=True))
            while (left := deadline - time.monotonic()) > 0:
                try:
                    change = await asyncio.wait_for(queue.get(), min(left, _BOOKMARK_EVERY_S))
                except TimeoutError:
                    if bookmarks:
                        await self._send(response, "BOOKMARK", self._bookmark(self.store.revision))
                    continue
                if change is None:
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too slow a watcher"}
                    await self._send(response, "ERROR", status)
                    break
                await self._send_change(response, change, selected)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the watcher went away, or the server stops
        finally:
            self.store.feed(self.resource).unsubscribe(queue)
        return response

    async def _send_change(self, response: web.StreamResponse, change: Change, selected: Predicate) -> None:
        kind = change.event(selected)
        if kind is not None:
            await self._send(response, kind, self._shape(change.object))

    def _bookmark(self, revision: int, *, initial_end: bool = False) -> Json:
        metadata: dict[str, Any] = {"resourceVersion": str(revision), "creationTimestamp": None}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        return {"kind": self.resource.kind, "apiVersion": self.resource.api_version, "metadata": metadata}

    @staticmethod
    async def _send(response: web.StreamResponse, kind: str, obj: Json) -> None:
        await response.write(json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n")

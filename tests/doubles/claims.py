"""The two sides of a driver of dynamic resources: an API server with slices and claims, and a kubelet that registers
the driver by its socket, asks it to prepare claims, and restarts.
"""

from __future__ import annotations

import json
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from tests.waiting import PATIENCE_S

from perseus_proto.dra import dra_pb2 as messages
from perseus_proto.dra import dra_pb2_grpc as stubs
from perseus_proto.registration import registration_pb2 as registration
from perseus_proto.registration import registration_pb2_grpc as registration_stubs
from perseus_sim.cluster.pki import Authority
from perseus_sim.gpus.cluster_api import ClusterApi

TOKEN = "the-drivers-token"


@dataclass
class ClaimServer:
    """Objects by path, over HTTPS, for one account. It refuses a write that was made from an older state."""

    folder: Path
    objects: dict[str, Any] = field(default_factory=dict)
    refusal: int = 0
    """HTTP status of all answers; 0: they are as they should be."""

    def __enter__(self) -> ClaimServer:
        authority = Authority("cluster")
        own = authority.issue("api", hosts=("127.0.0.1",))
        for name, content in {
            "ca.crt": authority.certificate, "tls.crt": own.certificate, "tls.key": own.key, "token": TOKEN.encode()
        }.items():  # fmt: skip
            (self.folder / name).write_bytes(content)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                status, found = server.handle(self.command, self.path, body, self.headers["Authorization"])
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "tls.crt", self.folder / "tls.key")
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def api(self) -> ClusterApi:
        return ClusterApi(f"https://127.0.0.1:{self._http.server_port}", self.folder)

    def handle(self, method: str, path: str, body: Any, authorization: str) -> tuple[int, Any]:
        if authorization != f"Bearer {TOKEN}":
            return 401, {}
        if self.refusal:
            return self.refusal, {}
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, {}
        elif path not in self.objects:
            return 404, {}
        if method == "GET":
            return 200, self.objects[path]
        version = self.objects.get(path, {}).get("metadata", {}).get("resourceVersion", "0")
        if body["metadata"].get("resourceVersion", "0") != version:
            return 409, {}
        body["metadata"]["resourceVersion"] = str(int(version) + 1)
        self.objects[path] = body
        return 200, body

    def allot(self, name: str, uid: str, *devices: tuple[str, str, str]) -> messages.Claim:
        """Store a claim that holds devices, each by driver, pool and name; no devices: it is not allocated yet."""
        results = [
            {"request": f"r{number}", "driver": driver, "pool": pool, "device": device}
            for number, (driver, pool, device) in enumerate(devices)
        ]
        status = {"allocation": {"devices": {"results": results}}} if devices else {}
        path = f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{name}"
        self.objects[path] = {"metadata": {"name": name, "uid": uid}, "status": status}
        return messages.Claim(namespace="team", uid=uid, name=name)


@dataclass
class ClaimKubelet:
    """The kubelet's side; it has no state but what it was told at its latest start."""

    folder: Path
    refusal: str = ""

    def start(self, driver: str) -> registration.PluginInfo:
        """Find the driver's socket, register it, and return what it says of itself."""
        socket = self.folder / f"{driver}.sock"
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            stub = registration_stubs.RegistrationStub(channel)
            info: registration.PluginInfo = stub.GetInfo(registration.InfoRequest(), timeout=PATIENCE_S)
            status = registration.RegistrationStatus(plugin_registered=not self.refusal, error=self.refusal)
            stub.NotifyRegistrationStatus(status, timeout=PATIENCE_S)
        return info

    @staticmethod
    def prepare(endpoint: str, *claims: messages.Claim) -> dict[str, messages.NodePrepareResourceResponse]:
        with grpc.insecure_channel(f"unix:{endpoint}") as channel:
            request = messages.NodePrepareResourcesRequest(claims=claims)
            return dict(stubs.DRAPluginStub(channel).NodePrepareResources(request, timeout=PATIENCE_S).claims)

    @staticmethod
    def unprepare(endpoint: str, *claims: messages.Claim) -> dict[str, messages.NodeUnprepareResourceResponse]:
        with grpc.insecure_channel(f"unix:{endpoint}") as channel:
            request = messages.NodeUnprepareResourcesRequest(claims=claims)
            return dict(stubs.DRAPluginStub(channel).NodeUnprepareResources(request, timeout=PATIENCE_S).claims)

"""A node whose containers are processes of this machine: pods of a real API server, run without images or isolation.

For the tests of the chart: its pods' commands, arguments, environment, Secrets, probes and service accounts are taken
as they stand in the API, and what a kubelet would report is reported. Programs stand for images by repository; every
pod has a loopback address of its own; mounts become folders, and their paths are rewritten in arguments. There is no
scheduler: this is the only node, and takes every pod. Nothing about Perseus belongs here.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from kubernetes import client

from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_proto.deviceplugin import deviceplugin_pb2_grpc as stubs
from perseus_sim import rbac
from perseus_sim.kubelet import KubeletDouble
from perseus_sim.processes import Child, Processes, StartFailed

log = logging.getLogger(__name__)
_POLL_S = 0.2
_HEARTBEAT_S = 10.0
"""The node controller gives a node up after 40 s."""


class _Registry(stubs.RegistrationServicer):
    """Takes every device plugin, and gives out none of its devices."""

    def Register(self, request: Any, context: Any) -> messages.Empty:  # noqa: N802, ARG002
        return messages.Empty()


@dataclass
class _Pod:
    """One pod that runs here."""

    namespace: str
    name: str
    spec: dict[str, Any]
    address: str
    folder: Path
    volumes: dict[str, Path] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    reported: tuple[str, bool] | None = None


class ProcessNode:
    """Use as a context; ``failures`` holds what could not be run."""

    def __init__(
        self, api: Any, kubeconfig: Path, folder: Path, programs: Mapping[str, Sequence[str]], name: str = "node-a"
    ) -> None:
        """``folder``: a short path, since sockets lie below it. ``programs``: entry point by image repository."""
        self.name = name
        self.failures: list[str] = []
        self._core: Any = client.CoreV1Api(api)
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._programs = programs
        self._processes = Processes(folder / "logs")
        self._pods: dict[str, _Pod] = {}
        self._addresses = 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        kubelet = self.host("/var/lib/kubelet")
        (kubelet / "device-plugins").mkdir(parents=True)
        self._kubelet = KubeletDouble(kubelet / "pod-resources")
        self._registry = grpc.server(ThreadPoolExecutor(max_workers=1))
        stubs.add_RegistrationServicer_to_server(_Registry(), self._registry)
        self._registry.add_insecure_port(f"unix:{kubelet / 'device-plugins' / 'kubelet.sock'}")

    def host(self, path: str) -> Path:
        """Where a path of the node lies here."""
        return self._folder / "host" / path.lstrip("/")

    def address_of(self, pod_prefix: str) -> str:
        """The address of the pod whose name begins so.

        Raises:
            KeyError: there is none, or more than one.
        """
        found = [pod.address for pod in self._pods.values() if pod.name.startswith(pod_prefix)]
        if len(found) != 1:
            raise KeyError(f"{len(found)} pods are called {pod_prefix}*")
        return found[0]

    def log_of(self, pod_prefix: str) -> str:
        """The logs of the pods whose name begins so."""
        return "\n".join(p.read_text(errors="replace") for p in (self._folder / "logs").glob(f"{pod_prefix}*.log"))

    def __enter__(self) -> Self:
        self._kubelet.start()
        self._registry.start()
        self._core.create_node({"metadata": {"name": self.name}})
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._processes.stop()
        self._registry.stop(0).wait()
        self._kubelet.stop()
        self._core.delete_node(self.name)

    def _run(self) -> None:
        beaten_s = time.monotonic()
        while not self._stop.wait(_POLL_S):
            try:
                if time.monotonic() - beaten_s > _HEARTBEAT_S:
                    beaten_s = time.monotonic()
                    self._beat()
                listed = {pod.metadata.uid: pod for pod in self._core.list_pod_for_all_namespaces().items}
                for uid in set(self._pods) - set(listed):
                    self._end(self._pods.pop(uid))
                for uid, body in listed.items():
                    if body.metadata.deletion_timestamp:
                        self._remove(uid, body)
                    elif uid not in self._pods:
                        self._start(uid, body)
                    else:
                        self._report(self._pods[uid])
            except (client.ApiException, OSError, StartFailed, KeyError) as problem:
                log.warning("node: %s", problem)
                self.failures.append(str(problem))

    def _beat(self) -> None:
        now = datetime.now(UTC).isoformat()
        ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastHeartbeatTime": now}
        self._core.patch_node_status(self.name, {"status": {"conditions": [ready]}})

    # ---------------------------------------------------------------------------------------- a pod's life

    def _start(self, uid: str, body: Any) -> None:
        meta, spec = body.metadata, self._core.api_client.sanitize_for_serialization(body)["spec"]
        if not body.spec.node_name:
            target = {"apiVersion": "v1", "kind": "Node", "name": self.name}
            self._core.create_namespaced_binding(
                meta.namespace, {"metadata": {"name": meta.name}, "target": target}, _preload_content=False
            )
        self._addresses += 1
        address, folder = f"127.77.0.{self._addresses}", self._folder / f"p{self._addresses}"
        pod = self._pods[uid] = _Pod(meta.namespace, meta.name, spec, address, folder)
        login = {"KUBECONFIG": os.devnull, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        if spec.get("automountServiceAccountToken", True):
            pod.folder.mkdir(parents=True, exist_ok=True)
            account = spec.get("serviceAccountName", "default")
            into = pod.folder / "kubeconfig"
            login["KUBECONFIG"] = str(rbac.log_in(self._kubeconfig, meta.namespace, account, into))
        for volume in spec.get("volumes", ()):
            self._mount(pod, volume)
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            command, environment = self._command(pod, container)
            child = self._processes.start(f"{meta.name}-{container['name']}", command, environment=environment | login)
            pod.children[container["name"]] = child
            probe = container.get("startupProbe", {})
            if "exec" in probe:
                test = [self._rewrite(pod, container, part) for part in probe["exec"]["command"]]
                child.wait_until(lambda test=test: subprocess.run(test, check=False).returncode == 0)  # type: ignore[misc]

    def _remove(self, uid: str, body: Any) -> None:
        if uid in self._pods:
            self._end(self._pods.pop(uid))
        with contextlib.suppress(client.ApiException):
            self._core.delete_namespaced_pod(body.metadata.name, body.metadata.namespace, grace_period_seconds=0)

    def _end(self, pod: _Pod) -> None:
        for child in reversed(pod.children.values()):
            child.stop()

    def _report(self, pod: _Pod) -> None:
        containers = pod.spec["containers"]
        ended = {name: child.popen.poll() for name, child in pod.children.items()}
        main = ended[containers[0]["name"]]
        phase = "Running" if main is None else "Succeeded" if main == 0 else "Failed"
        ready = phase == "Running" and all(self._ready(pod, container) for container in containers)
        if (phase, ready) == pod.reported:
            return
        now = datetime.now(UTC).isoformat()
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        states = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}}
                if main is None
                else {"terminated": {"exitCode": main, "startedAt": now, "finishedAt": now}},
            }
            for container in containers
        ]
        status = {
            "phase": phase,
            "podIP": pod.address,
            "podIPs": [{"ip": pod.address}],
            "hostIP": "127.0.0.1",
            "conditions": [condition],
            "containerStatuses": states,
        }
        self._core.patch_namespaced_pod_status(pod.name, pod.namespace, {"status": status})
        pod.reported = phase, ready

    def _ready(self, pod: _Pod, container: Mapping[str, Any]) -> bool:
        probe = container.get("readinessProbe", {}).get("httpGet")
        if probe is None:
            return True
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        url = f"http://{pod.address}:{ports.get(probe['port'], probe['port'])}{probe['path']}"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    # -------------------------------------------------------------------------------- from manifest to process

    def _mount(self, pod: _Pod, volume: Mapping[str, Any]) -> None:
        name = volume["name"]
        place = self.host(volume["hostPath"]["path"]) if "hostPath" in volume else pod.folder / name
        place.mkdir(parents=True, exist_ok=True)
        pod.volumes[name] = place
        if "secret" in volume:
            secret = self._core.read_namespaced_secret(volume["secret"]["secretName"], pod.namespace)
            for key, data in secret.data.items():
                (place / key).write_bytes(base64.b64decode(data))

    def _command(self, pod: _Pod, container: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        environment = {}
        for variable in container.get("env", ()):
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            environment[variable["name"]] = self.name if path == "spec.nodeName" else variable.get("value", "")
        repository = re.sub(r"(@.*|:[^:/]*)$", "", container["image"]).rpartition("/")[2]
        command = container.get("command") or self._programs[repository]
        words = [self._rewrite(pod, container, word) for word in [*command, *container.get("args", ())]]
        expand = re.compile(r"\$\((\w+)\)")
        return [expand.sub(lambda found: environment[found[1]], word) for word in words], environment

    def _rewrite(self, pod: _Pod, container: Mapping[str, Any], word: str) -> str:
        places = {mount["mountPath"]: pod.volumes[mount["name"]] for mount in container.get("volumeMounts", ())}
        if places:
            longest_first = sorted(places, key=len, reverse=True)
            word = re.sub(
                "|".join(rf"{re.escape(path)}(?![\w-])" for path in longest_first), lambda m: str(places[m[0]]), word
            )
        return word.replace("0.0.0.0", pod.address)

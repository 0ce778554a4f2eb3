"""A node whose containers are processes of this machine: pods of a real API server, run without images or isolation.

For the tests of the chart: commands, arguments, environment, volumes, probes and service accounts of its pods are taken
as they stand in the API, devices come from device plugins, and the node reports what a kubelet would report. Programs
stand for images by repository; every pod has its own loopback address; mounts become folders, and their paths are
rewritten in arguments and environment. There is no scheduler: this is the only node, and takes every pod. It knows
nothing of Perseus.
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
from perseus_sim.cluster import rbac
from perseus_sim.gpus.kubelet import AdmittedPod, KubeletDouble
from perseus_sim.processes import Child, Processes, StartFailed

log = logging.getLogger(__name__)
_POLL_S = 0.2
_HEARTBEAT_S = 10.0
"""The node controller gives a node up after 40 s."""


class _DeviceManager(stubs.RegistrationServicer):
    """Device plugins that have registered, and which of their devices are taken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._endpoints: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        """Pod UID by device."""

    def Register(self, request: messages.RegisterRequest, context: Any) -> messages.Empty:
        self._endpoints[request.resource_name] = request.endpoint
        threading.Thread(target=self._watch, args=(request.endpoint,), daemon=True).start()
        return messages.Empty()

    def _watch(self, endpoint: str) -> None:
        """Watch the plugin's list as long as it serves: a plugin that no kubelet watches registers again."""
        with (
            grpc.insecure_channel(f"unix:{self._folder / endpoint}") as channel,
            contextlib.suppress(grpc.RpcError),
        ):
            for _ in stubs.DevicePluginStub(channel).ListAndWatch(messages.Empty()):
                pass

    def allocate(self, uid: str, resource: str, count: int) -> tuple[list[str], messages.ContainerAllocateResponse]:
        """Devices for a container, and what it gets with them.

        Raises:
            LookupError: no plugin offers the resource, or too few devices are free.
        """
        if resource not in self._endpoints:
            raise LookupError(f"no device plugin offers {resource}")
        with grpc.insecure_channel(f"unix:{self._folder / self._endpoints[resource]}") as channel:
            plugin = stubs.DevicePluginStub(channel)
            stream = plugin.ListAndWatch(messages.Empty())
            free = [device.ID for device in next(stream).devices if device.ID not in self._taken]
            stream.cancel()
            if len(free) < count:
                raise LookupError(f"{count} {resource} are asked for, {len(free)} are free")
            wanted = messages.ContainerAllocateRequest(devices_ids=free[:count])
            answer = plugin.Allocate(messages.AllocateRequest(container_requests=[wanted]))
        self._taken.update(dict.fromkeys(free[:count], uid))
        return free[:count], answer.container_responses[0]

    def free(self, uid: str) -> None:
        """The pod has gone."""
        self._taken = {device: holder for device, holder in self._taken.items() if holder != uid}


@dataclass
class _Pod:
    """One pod that runs here."""

    namespace: str
    name: str
    spec: dict[str, Any]
    address: str
    folder: Path
    volumes: dict[str, Path] = field(default_factory=dict)
    devices: messages.ContainerAllocateResponse = field(default_factory=messages.ContainerAllocateResponse)
    placed: set[int] = field(default_factory=set)
    """Processes that the kubelet's double knows to be in this pod."""
    children: dict[str, Child] = field(default_factory=dict)
    reported: tuple[str, bool] | None = None


class ProcessNode:
    """Use as a context; ``failures`` holds what could not be run."""

    def __init__(
        self,
        api: Any,
        kubeconfig: Path,
        folder: Path,
        programs: Mapping[str, Sequence[str]],
        *,
        proc_root_variable: str,
        name: str = "node-a",
    ) -> None:
        """A node that is not in the API yet.

        Args:
            api: the administrator's connection.
            kubeconfig: of the same server.
            folder: a short path, since sockets lie below it.
            programs: entry point by image repository.
            proc_root_variable: environment variable by which a program is told where the node's /proc is: processes
                here are in no pod's control group, so it is a double.
            name: of the node.
        """
        self.name = name
        self.failures: list[str] = []
        self._core: Any = client.CoreV1Api(api)
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._programs = programs
        self._processes = Processes(folder / "logs")
        self._pods: dict[str, _Pod] = {}
        self._addresses = 1
        self._network = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
        """One of our own: pods listen on ports that are given, and others may run such a node on this machine, too."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        kubelet = self.host("/var/lib/kubelet")
        (kubelet / "device-plugins").mkdir(parents=True)
        self._kubelet = KubeletDouble(kubelet / "pod-resources")
        self._environment = {proc_root_variable: str(self._kubelet.proc_root)}
        self._devices = _DeviceManager(kubelet / "device-plugins")
        self._registry = grpc.server(ThreadPoolExecutor(max_workers=1))
        stubs.add_RegistrationServicer_to_server(self._devices, self._registry)
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
                    self._end(uid)
                for uid, body in listed.items():
                    if body.metadata.deletion_timestamp:
                        self._remove(uid, body)
                    elif uid not in self._pods:
                        self._start(uid, body)
                    else:
                        self._place(uid, self._pods[uid])
                        self._report(self._pods[uid])
            except (client.ApiException, grpc.RpcError, OSError, StartFailed, LookupError) as problem:
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
        address, folder = f"{self._network}.{self._addresses}", self._folder / f"p{self._addresses}"
        pod = self._pods[uid] = _Pod(meta.namespace, meta.name, spec, address, folder)
        login = {"KUBECONFIG": os.devnull, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        if spec.get("automountServiceAccountToken", True):
            pod.folder.mkdir(parents=True, exist_ok=True)
            account = spec.get("serviceAccountName", "default")
            into = pod.folder / "kubeconfig"
            login["KUBECONFIG"] = str(rbac.log_in(self._kubeconfig, meta.namespace, account, into))
        login |= self._environment
        for volume in spec.get("volumes", ()):
            self._mount(pod, volume)
        self._allocate(uid, pod)
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
            self._end(uid)
        with contextlib.suppress(client.ApiException):
            self._core.delete_namespaced_pod(body.metadata.name, body.metadata.namespace, grace_period_seconds=0)

    def _end(self, uid: str) -> None:
        pod = self._pods.pop(uid)
        for child in reversed(pod.children.values()):
            child.stop()
        self._kubelet.remove(uid)
        self._devices.free(uid)

    def _allocate(self, uid: str, pod: _Pod) -> None:
        """Devices for the pod's one container that asks for any."""
        for container in pod.spec["containers"]:
            for resource, count in container.get("resources", {}).get("limits", {}).items():
                if "/" in resource:
                    names, pod.devices = self._devices.allocate(uid, resource, int(count))
                    self._kubelet.admit(AdmittedPod(uid, pod.namespace, pod.name, tuple(names)))

    def _place(self, uid: str, pod: _Pod) -> None:
        """Record which processes are in the pod, if a kubelet is simulated."""
        if not pod.devices.envs:
            return
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        inside = {child.pid for child in pod.children.values()}
        while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
            inside |= more
        self._kubelet.place(sorted(inside - pod.placed), uid)
        pod.placed = inside

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
        if "configMap" in volume:
            config_map = self._core.read_namespaced_config_map(volume["configMap"]["name"], pod.namespace)
            for key, text in (config_map.data or {}).items():
                (place / key).write_text(text)
        if "secret" in volume:
            secret = self._core.read_namespaced_secret(volume["secret"]["secretName"], pod.namespace)
            for key, data in secret.data.items():
                (place / key).write_bytes(base64.b64decode(data))

    def _command(self, pod: _Pod, container: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        environment = {}
        for variable in container.get("env", ()):
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = self.name if path == "spec.nodeName" else variable.get("value", "")
            environment[variable["name"]] = self._rewrite(pod, container, value)
        if any("/" in resource for resource in container.get("resources", {}).get("limits", {})):
            environment |= {name: self._rewrite(pod, container, value) for name, value in pod.devices.envs.items()}
        repository = re.sub(r"(@.*|:[^:/]*)$", "", container["image"]).rpartition("/")[2]
        # What stands for an image is a program of this machine, wherever the checkout lies: not a path of the pod's.
        program = [] if container.get("command") else self._programs[repository]
        given = [*(container.get("command") or ()), *container.get("args", ())]
        words = [*program, *(self._rewrite(pod, container, word) for word in given)]
        expand = re.compile(r"\$\((\w+)\)")
        return [expand.sub(lambda found: environment[found[1]], word) for word in words], environment

    def _rewrite(self, pod: _Pod, container: Mapping[str, Any], word: str) -> str:
        places = {mount["mountPath"]: pod.volumes[mount["name"]] for mount in container.get("volumeMounts", ())}
        places |= {mount.container_path: Path(mount.host_path) for mount in pod.devices.mounts}
        if places:
            # Whole paths only: neither the end of another path nor the beginning of a longer name.
            longest_first = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
            word = re.sub(rf"(?<![\w.-])({longest_first})(?![\w.-])", lambda found: str(places[found[0]]), word)
        return word.replace("0.0.0.0", pod.address)

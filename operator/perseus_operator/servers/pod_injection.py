"""What a training pod lacks to reach the agent of its node: the socket's directory and the variable that names it, or
the request for the extended resource with which the kubelet gives a container both.

It is idempotent: a pod that has them is returned unchanged. Nothing else is added, and nothing is removed or replaced.
No pod may fail to be created or to start because of it: what cannot be added safely is left out, with a warning.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from perseus_core import keys
from perseus_operator.objects.values import Json
from perseus_operator.servers.socket_offers import GPUS

VOLUME: Final = "perseus-agent"
_RUN, _VAR_RUN = PurePosixPath("/run"), PurePosixPath("/var/run")
_WINDOWS: Final = f"{keys.LABEL_JOB}: a pod for Windows cannot reach an agent"


@dataclass(frozen=True)
class Injected:
    """A pod with what it lacked, and what the user should know."""

    pod: Json
    warnings: tuple[str, ...] = ()


def inject(pod: Mapping[str, Any], socket: str) -> Injected:
    """Add the agent's socket to the containers of a pod.

    Args:
        pod: as the API server sends it for admission.
        socket: path of the agent's socket on nodes; it has the same path in containers.

    Returns:
        A changed copy of the pod, and a warning for each container that cannot be given the socket.
    """
    changed = copy.deepcopy(dict(pod))
    spec = changed.get("spec") or {}
    if _is_windows(spec):
        return Injected(changed, (_WINDOWS,))
    directory = str(PurePosixPath(socket).parent)
    agent_volumes = {v["name"] for v in spec.get("volumes") or () if _is_host_directory(v, directory)}
    taken = {v["name"] for v in spec.get("volumes") or ()} - agent_volumes
    if VOLUME in taken:
        rule = f"is not the node's directory {directory}"
        return Injected(changed, (f"volume {VOLUME} {rule}: the agent's socket is not mounted",))
    volume = VOLUME if VOLUME in agent_volumes else min(agent_volumes, default=VOLUME)
    containers, warnings = _chosen(changed, spec.get("containers") or [])
    containers = [container for container in containers if not _requests_socket(container)]
    mounted = False
    for container in containers:
        problem = _obstacle(container, socket, directory, agent_volumes)
        if problem:
            warnings.append(f"container {container['name']}: {problem}")
            continue
        if not any(_at(mount, directory) for mount in container.get("volumeMounts") or ()):
            mounts = container.get("volumeMounts") or []
            container["volumeMounts"] = [*mounts, {"name": volume, "mountPath": directory, "readOnly": True}]
            mounted = True
        if _socket_of(container) is None:
            container["env"] = [*(container.get("env") or ()), {"name": keys.ENV_SOCKET, "value": socket}]
    if mounted and not agent_volumes:
        # Created if missing: on a node without an agent a pod must start all the same.
        source = {"path": directory, "type": "DirectoryOrCreate"}
        spec["volumes"] = [*(spec.get("volumes") or ()), {"name": volume, "hostPath": source}]
    return Injected(changed, tuple(warnings))


def request(pod: Mapping[str, Any], socket: str, lacking: str) -> Injected:
    """Let the containers with GPUs request the agent's socket, which needs no hostPath.

    A container without a GPU runs no rank, and its pod, such as a launcher's, may belong on a node without an agent.

    Args:
        pod: as the API server sends it for admission.
        socket: path of the agent's socket on nodes; it has the same path in containers.
        lacking: why a pod with the request might not be scheduled, in which case it is not added; empty: it will be.

    Returns:
        A changed copy of the pod, and a warning for each container that is not given the socket.
    """
    changed = copy.deepcopy(dict(pod))
    spec = changed.get("spec") or {}
    if _is_windows(spec):
        return Injected(changed, (_WINDOWS,))
    directory = str(PurePosixPath(socket).parent)
    agent_volumes = {v["name"] for v in spec.get("volumes") or () if _is_host_directory(v, directory)}
    containers, warnings = _chosen(changed, spec.get("containers") or [])
    wanted = []
    for container in filter(_has_gpu, containers):
        if _requests_socket(container) or any(_at(mount, directory) for mount in container.get("volumeMounts") or ()):
            continue
        if problem := _obstacle(container, socket, directory, agent_volumes):
            warnings.append(f"container {container['name']}: {problem}")
        else:
            wanted.append(container)
    if wanted and lacking:
        why = f"{keys.RESOURCE_AGENT} is not requested, because the pod might wait for it: {lacking}"
        return Injected(changed, (*warnings, f"{why}; it trains at default clocks"))
    for container in wanted:
        resources = container.get("resources") or {}
        container["resources"] = resources | {
            kind: {**(resources.get(kind) or {}), keys.RESOURCE_AGENT: "1"} for kind in ("limits", "requests")
        }
    return Injected(changed, tuple(warnings))


def _is_windows(spec: Json) -> bool:
    return (spec.get("os") or {}).get("name") == "windows"


def _has_gpu(container: Json) -> bool:
    """Whether a container asks for a GPU, or for a claim, which may be one."""
    resources = container.get("resources") or {}
    return bool(resources.get("claims")) or any(name.startswith(GPUS) for name in resources.get("limits") or ())


def _requests_socket(container: Json) -> bool:
    return keys.RESOURCE_AGENT in ((container.get("resources") or {}).get("limits") or {})


def _chosen(pod: Json, containers: list[Json]) -> tuple[list[Json], list[str]]:
    """The containers that the annotation names, or all of them; and a warning for each name that is none."""
    named = ((pod.get("metadata") or {}).get("annotations") or {}).get(keys.ANNOTATION_CONTAINERS)
    if named is None:
        return containers, []
    names = [name.strip() for name in named.split(",") if name.strip()]
    there = {container["name"] for container in containers}
    warnings = [f"{keys.ANNOTATION_CONTAINERS}: there is no container {name}" for name in names if name not in there]
    return [container for container in containers if container["name"] in names], warnings


def _obstacle(container: Json, socket: str, directory: str, agent_volumes: set[str]) -> str | None:
    """Return why a container cannot be given the socket; None: it can."""
    stated = _socket_of(container)
    if stated not in (None, socket):
        return f"{keys.ENV_SOCKET} is set to something other than {socket}: left unchanged"
    there = _places(directory)
    for mount in container.get("volumeMounts") or ():
        path = PurePosixPath(mount["mountPath"])
        if _places(str(path)) & there:
            if mount["name"] not in agent_volumes or mount.get("subPath") or mount.get("subPathExpr"):
                return f"mounts another volume at {path}: left unchanged"
        # A runtime could not make a mount point in a volume that is read-only, and the container would not start.
        elif _places(str(path)) & {parent for place in there for parent in place.parents}:
            return f"mounts a volume at {path}, above {directory}: left unchanged"
        elif there & {parent for place in _places(str(path)) for parent in place.parents}:
            return f"mounts a volume at {path}, below {directory}: left unchanged"
    return None


def _socket_of(container: Json) -> str | None:
    """Return the socket that the container's environment names; empty: it is known only when the container runs."""
    for variable in container.get("env") or ():
        if variable["name"] == keys.ENV_SOCKET:
            return str(variable.get("value", ""))
    return None


def _places(path: str) -> set[PurePosixPath]:
    """A path as it is written, and as it is where images link ``/var/run`` to ``/run``, as most do."""
    written = PurePosixPath(posixpath.normpath(path))
    return {written, _RUN / written.relative_to(_VAR_RUN)} if written.is_relative_to(_VAR_RUN) else {written}


def _at(mount: Json, directory: str) -> bool:
    return PurePosixPath(mount["mountPath"]) == PurePosixPath(directory)


def _is_host_directory(volume: Json, directory: str) -> bool:
    path = (volume.get("hostPath") or {}).get("path")
    return path is not None and PurePosixPath(path) == PurePosixPath(directory)

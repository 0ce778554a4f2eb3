"""A tenant who may ``edit`` one namespace and turns every right against others: large objects, floods, plants."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.config import new_client_from_config
from training_job import TRAINER_IMAGE

from perseus_core import keys
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY
from perseus_sim.cluster import rbac

EVIL = "evil"
FLOOD = (Path(__file__).parent / "flood.py").read_text(encoding="utf-8")
OBJECTS = 12
_GROUP = (keys.API_GROUP, keys.API_VERSION, EVIL)
_API_VERSION = f"{keys.API_GROUP}/{keys.API_VERSION}"
_SELF = "mallory"


class EvilTenant:
    """The tenant, with a kubeconfig of their own."""

    def __init__(self, kubeconfig: Path, api: Any, folder: Path) -> None:
        """Make the namespace and the account; ``api``: the administrator's connection."""
        self._core, self._administrator = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._core.create_namespace({"metadata": {"name": EVIL}})
        self._core.create_namespaced_service_account(EVIL, {"metadata": {"name": _SELF}})
        binding: Any = {
            "metadata": {"name": _SELF},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"kind": "ServiceAccount", "name": _SELF, "namespace": EVIL}],
        }
        client.RbacAuthorizationV1Api(api).create_namespaced_role_binding(EVIL, binding)
        own: Any = new_client_from_config
        self._api = own(str(rbac.log_in(kubeconfig, EVIL, _SELF, folder / "mallory")))
        self._custom = client.CustomObjectsApi(self._api)

    def end(self) -> None:
        """Remove all of it. Nobody waits for it."""
        self._api.close()
        self._core.delete_namespace(EVIL)

    def may_not(self, action: Callable[[], object]) -> int:
        """The HTTP status with which the API server refuses an action; 0: it does not."""
        try:
            action()
        except client.ApiException as error:
            return int(error.status)
        return 0

    def make(self, plural: str, kind: str, name: str, spec: dict[str, Any]) -> None:
        """Create an object of a kind of Perseus."""
        body = {"apiVersion": _API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self._custom.create_namespaced_custom_object(*_GROUP, plural, body)

    def fill(self) -> None:
        """Make jobs and profiles as large as the schemas allow: the operator reads every one."""
        noise = base64.b64encode(os.urandom(700_000)).decode()
        rows = "stage,instruction,frequency,time,energy\n" + "0,forward,1410,1e-9,1e300\n" * 35_000
        for number in range(OBJECTS):
            name, csv = f"large-{number}", (noise, rows)[number % 2]
            self.make(keys.PROFILE_PLURAL, keys.PROFILE_KIND, name, {"csv": csv, "blockingPowerMilliwatts": 1})
            pipeline = {"schedule": "FromRanks", "stages": 1024, "dataParallel": 128}
            self.make(keys.PLURAL, keys.KIND, name, {"pipeline": pipeline, "profile": {"profileRef": {"name": name}}})

    def plant(self, frontier: dict[str, Any]) -> None:
        """Plant a frontier of the digest of another's job, with bytes that unpack to gigabytes.

        Only an administrator may write it: what if one did?
        """
        bomb = base64.b64encode(b"\xfd7zXZ\x00\x00\x04" + bytes(600_000)).decode()
        labels = {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: "large-0"}
        body = {
            "apiVersion": _API_VERSION,
            "kind": keys.FRONTIER_KIND,
            "metadata": {"name": "large-0", "labels": labels},
            "spec": {**frontier, "data": bomb, "sweep": base64.b64encode(b"\x78\x9c" + bytes(200_000)).decode()},
        }
        self._administrator.create_namespaced_custom_object(*_GROUP, keys.FRONTIER_PLURAL, body)

    def flood(self, nodes: list[str], socket_directory: str) -> None:
        """Run the flood on nodes, in pods without a GPU, lease or PerseusJob of theirs."""
        for node in nodes:
            container = {
                "name": "flood",
                "image": TRAINER_IMAGE,
                "command": ["python", "-c", FLOOD],
                "resources": {"limits": {"cpu": "300m", "memory": "256Mi"}},
                "volumeMounts": [{"name": "perseus", "mountPath": "/run/perseus"}],
            }
            spec = {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
                "volumes": [{"name": "perseus", "hostPath": {"path": socket_directory}}],
            }
            body: Any = {"metadata": {"name": f"flood-{node}", "labels": {keys.LABEL_JOB: "large-0"}}, "spec": spec}
            client.CoreV1Api(self._api).create_namespaced_pod(EVIL, body)

    def tried(self, node: str) -> int:
        """How many connections the flood on a node has tried."""
        lines = (self._core.read_namespaced_pod_log(f"flood-{node}", EVIL) or "").split("\n")
        return max((int(line.split()[0]) for line in lines if line), default=0)

"""KEDA on a real cluster, by the kustomization of its module, without its webhooks.

Its operator makes the certificates by itself, and brings the external metrics API into the cluster.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from controllers import USER, build, writable

from local_cluster.errors import ClusterError
from local_cluster.images import wrap

NAMESPACE: Final = "keda"
_PARTS: Final = ("crd", "general", "rbac", "manager", "metrics-server", "service_account")
_IMAGES: Final = {"keda": "ghcr.io/kedacore/keda", "keda-adapter": "ghcr.io/kedacore/keda-metrics-apiserver"}


@contextlib.contextmanager
def keda(cluster: Any, folder: Path, *, patience_s: float) -> Iterator[None]:
    """Install it for a while."""
    if shutil.which("go") is None:
        pytest.skip("no Go on this machine to build KEDA")
    binaries = build.folder()
    build.build([*_IMAGES], binaries)
    for name in _IMAGES:
        wrap(binaries / name, f"local/{name}:v1", folder / f"{name}.tar")
        cluster.load(folder / f"{name}.tar")
    source = writable(build.source("keda") / "config", folder / "config")
    container = "/spec/template/spec/containers/0"
    pod = [
        {"op": "add", "path": f"{container}/imagePullPolicy", "value": "Never"},
        {"op": "add", "path": f"{container}/securityContext/runAsUser", "value": USER},
    ]
    no_webhooks = [{"op": "add", "path": f"{container}/args/-", "value": "--enable-webhook-patching=false"}]
    overlay = folder / "overlay"
    overlay.mkdir()
    kustomization = {
        "resources": [f"../{source.name}/{part}" for part in _PARTS],
        "images": [{"name": image, "newName": f"local/{name}", "newTag": "v1"} for name, image in _IMAGES.items()],
        "patches": [
            {"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(pod)},
            {"target": {"kind": "Deployment", "name": "keda-operator"}, "patch": yaml.safe_dump(no_webhooks)},
        ],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    try:
        cluster.kubectl("apply", "--server-side", "--kustomize", str(overlay))
        for name in ("keda-operator", "keda-metrics-apiserver"):
            cluster.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", f"--timeout={patience_s:.0f}s")
        yield
    finally:
        # While its operator runs, which ends what ScaledObjects have; then the API, without which no namespace ends.
        for command in (
            ("delete", "scaledobject", "--all", "--all-namespaces", "--timeout=60s"),
            ("delete", "apiservice", "v1beta1.external.metrics.k8s.io", "--ignore-not-found"),
            ("delete", "--ignore-not-found", "--timeout=120s", "--kustomize", str(overlay)),
        ):
            with contextlib.suppress(ClusterError):
                cluster.kubectl(*command)

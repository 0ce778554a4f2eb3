"""Build Kubernetes binaries and tools of releases from pinned Go modules, once, into a cache outside the tree.

usage: build.py [--where] [BINARY ...]

It prints the folder of the binaries, a value for KUBEBUILDER_ASSETS. Each is built once for the pins of its module, and
linked into the folder for all pins: an update of one product builds no other anew. Versions are pinned in go.mod and
go.sum of each product's folder beside this file: one module per product, because each pins its own dependencies. To add
a binary, add a ``Binary`` below and its ``tool`` line to the module. Standard library only, because it runs before
there is a virtual environment.

Environment: KUBERNETES=1.37 takes that release instead of the usual one, from the folder of its name.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = b"1"
"""Part of the cache's key: increase it when build flags change."""


@dataclass(frozen=True)
class Binary:
    """One program and how to build it."""

    module: str
    """Folder of its Go module."""
    package: str
    release: str
    """Module whose version the program reports; empty for a program of this project."""
    version_variable: str = ""
    """The variable that -ldflags sets to the version; empty if the source contains its version."""
    tags: str = ""
    """Build tags, separated by commas."""
    links_c: bool = False
    """Whether it is linked with C libraries of this machine, whose headers it needs."""


_KUBERNETES = "-".join(["kubernetes", *filter(None, [os.environ.get("KUBERNETES")])])
"""Folder of the module of Kubernetes."""


def _kubernetes(name: str) -> Binary:
    return Binary(_KUBERNETES, f"k8s.io/kubernetes/cmd/{name}", "k8s.io/kubernetes", "k8s.io/component-base/version")


BINARIES = {
    **{
        name: _kubernetes(name)
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubectl",
            "kubelet",
            "kube-proxy",
        )
    },
    "etcd": Binary("etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
    "helm": Binary("helm", "helm.sh/helm/v4/cmd/helm", "helm.sh/helm/v4", "helm.sh/helm/v4/internal/version.version"),
    **{
        name: Binary(
            "containerd",
            f"github.com/containerd/containerd/v2/cmd/{name}",
            "github.com/containerd/containerd/v2",
            "github.com/containerd/containerd/v2/version.Version",
            "no_btrfs,no_devmapper,no_zfs",
        )
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    },
    # Debian's is too old for user namespaces. The headers are those of Debian's libseccomp-dev.
    "runc": Binary(
        "runc", "github.com/opencontainers/runc", "github.com/opencontainers/runc", tags="seccomp", links_c=True
    ),
    "kwok": Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok", "sigs.k8s.io/kwok"),
    "coredns": Binary("coredns", "github.com/coredns/coredns", "github.com/coredns/coredns"),
    # Without its web page, and with Kubernetes as its only service discovery.
    "prometheus": Binary(
        "prometheus",
        "github.com/prometheus/prometheus/cmd/prometheus",
        "github.com/prometheus/prometheus",
        "github.com/prometheus/common/version.Version",
        "remove_all_sd,enable_kubernetes_sd",
    ),
    "pause": Binary("pause", ".", ""),
    # Controllers of workloads, in whose pods tests of the cluster train. Their modules hold what installs them, too.
    "jobset": Binary("jobset", "sigs.k8s.io/jobset", "sigs.k8s.io/jobset"),
    "in-place-restart-agent": Binary("jobset", "sigs.k8s.io/jobset/cmd/in-place-restart-agent", "sigs.k8s.io/jobset"),
    "kueue": Binary("kueue", "sigs.k8s.io/kueue/cmd/kueue", "sigs.k8s.io/kueue"),
    "lws": Binary("lws", "sigs.k8s.io/lws/cmd", "sigs.k8s.io/lws"),
    # KEDA's operator asks scalers, its adapter serves what they say to HorizontalPodAutoscalers.
    **{
        name: Binary(
            "keda",
            f"github.com/kedacore/keda/v2/cmd/{folder}",
            "github.com/kedacore/keda/v2",
            "github.com/kedacore/keda/v2/version.Version",
        )
        for name, folder in (("keda", "operator"), ("keda-adapter", "adapter"))
    },
    "trainer": Binary(
        "trainer", "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager", "github.com/kubeflow/trainer/v2"
    ),
    "kuberay": Binary(
        "kuberay", "github.com/ray-project/kuberay/ray-operator", "github.com/ray-project/kuberay/ray-operator"
    ),
    "mpi": Binary("mpi", "github.com/kubeflow/mpi-operator/cmd/mpi-operator", "github.com/kubeflow/mpi-operator"),
    "training-operator": Binary(
        "training-operator",
        "github.com/kubeflow/training-operator/cmd/training-operator.v1",
        "github.com/kubeflow/training-operator",
    ),
    "volcano": Binary("volcano", "volcano.sh/volcano/cmd/controller-manager", "volcano.sh/volcano"),
    "volcano-scheduler": Binary("volcano", "volcano.sh/volcano/cmd/scheduler", "volcano.sh/volcano"),
    # With which `make release` stores, signs and copies images.
    "registry": Binary(
        "registry",
        "github.com/distribution/distribution/v3/cmd/registry",
        "github.com/distribution/distribution/v3",
        "github.com/distribution/distribution/v3/version.version",
    ),
    "cosign": Binary(
        "cosign",
        "github.com/sigstore/cosign/v3/cmd/cosign",
        "github.com/sigstore/cosign/v3",
        "sigs.k8s.io/release-utils/version.gitVersion",
    ),
    "oras": Binary("oras", "oras.land/oras/cmd/oras", "oras.land/oras"),
}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")


class BuildFailed(Exception):
    """A build failed; nothing was put into the cache. The message is one sentence for the command line."""


def _go(*arguments: str, module: str = ".", links_c: bool = False) -> str:
    """Run the go command in a module's folder and return its output; standard error passes through.

    Raises:
        BuildFailed: the command failed, or Go is not installed.
    """
    go = shutil.which("go")
    if go is None:
        raise BuildFailed("go is not installed: building the binaries needs the Go toolchain, 1.26 or newer")
    environment = {**os.environ, "CGO_ENABLED": "1" if links_c else "0", "GOWORK": "off"}
    ran = subprocess.run(
        [go, *arguments], cwd=HERE / module, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if ran.returncode != 0:
        raise BuildFailed(f"`go {arguments[0]}` failed in {HERE / module}")
    return ran.stdout.strip()


def folder() -> Path:
    """Return the cache folder for all these pins, this recipe, this Go version and this platform."""
    return _cache() / "control-plane" / _key(*{binary.module for binary in BINARIES.values()})


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perseus-k8s"


def _key(*modules: str) -> str:
    key = hashlib.sha256(_go("env", "GOVERSION", "GOOS", "GOARCH").encode() + RECIPE)
    for source in sorted(path for module in modules for path in (HERE / module).glob("*")):
        key.update(source.read_bytes())
    return key.hexdigest()[:16]


def version(binary: Binary) -> str:
    """Return the pinned release from go.mod, or the recipe for a program that is built from this folder alone."""
    if not binary.release:
        return f"v{RECIPE.decode()}"
    pins = (HERE / binary.module / "go.mod").read_text(encoding="utf-8")
    found = re.search(rf"^\t{re.escape(binary.release)} (v\S+)", pins, re.MULTILINE)
    if not found:
        raise BuildFailed(f"{binary.module}/go.mod does not require {binary.release}")
    return found[1]


def source(name: str) -> Path:
    """Return the folder of a binary's module, which may hold its chart."""
    binary = BINARIES[name]
    return Path(_go("list", "-m", "-f", "{{.Dir}}", binary.release, module=binary.module))


def _link_flags(binary: Binary) -> str:
    # Without these flags kube-apiserver reports v0.0.0-master, which breaks clients that compare versions.
    pinned, variable = version(binary), binary.version_variable
    if binary.module == _KUBERNETES:
        major, minor, _ = pinned.removeprefix("v").split(".", 2)
        values = {f"{variable}.gitVersion": pinned, f"{variable}.gitMajor": major, f"{variable}.gitMinor": minor}
    else:
        values = {variable: pinned} if variable else {}
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in values.items())])


def build(names: Sequence[str], into: Path) -> None:
    """Build the missing binaries. Each appears complete or not at all; of two runs at the same time only one builds."""
    if all((into / name).exists() for name in names):
        return
    into.mkdir(parents=True, exist_ok=True)
    cache = _cache() / "built"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another build ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for abandoned in cache.glob("building-*"):  # of a run that was killed: this one holds the lock
            shutil.rmtree(abandoned)
        missing = [name for name in dict.fromkeys(names) if not (into / name).exists()]
        for number, name in enumerate(missing, 1):
            binary, step, started = BINARIES[name], f"{number} of {len(missing)}", time.monotonic()
            built = cache / f"{binary.module}-{_key(binary.module)}" / name
            if not built.exists():
                print(f"{step}: building {name} {version(binary)} ...", file=sys.stderr, flush=True)
                partial = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
                try:
                    flags = ["-trimpath", "-buildvcs=false", "-tags", binary.tags, "-ldflags", _link_flags(binary)]
                    command = ("build", *flags, "-o", str(partial / name), binary.package)
                    _go(*command, module=binary.module, links_c=binary.links_c)
                    built.parent.mkdir(exist_ok=True)
                    (partial / name).replace(built)
                finally:
                    shutil.rmtree(partial)
                took_s, size_mib = time.monotonic() - started, built.stat().st_size / 2**20
                print(f"{step}: built {name}: {took_s:.0f} s, {size_mib:.0f} MiB", file=sys.stderr, flush=True)
            (into / name).hardlink_to(built)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build Kubernetes binaries for tests and print their folder.")
    parser.add_argument("--where", action="store_true", help="print the folder and build nothing")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="BINARY",
        default=CONTROL_PLANE,
        help=f"one of {', '.join(BINARIES)}; default: {' '.join(CONTROL_PLANE)}",
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in BINARIES:
            parser.error(f"unknown binary {name!r}: known are {', '.join(BINARIES)}")
    if not (HERE / _KUBERNETES).is_dir():
        known = ", ".join(sorted(path.name.removeprefix("kubernetes-") for path in HERE.glob("kubernetes-*")))
        parser.error(f"KUBERNETES={os.environ['KUBERNETES']}: no such folder; unset it, or use one of {known}")
    try:
        into = folder()
        if not arguments.where:
            build(arguments.names, into)
    except BuildFailed as error:
        sys.exit(f"control plane: {error}")
    print(into)


if __name__ == "__main__":
    main()

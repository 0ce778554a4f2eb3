"""A real Kubernetes control plane on loopback, without nodes: etcd, kube-apiserver, kube-controller-manager.

For tests (``control_plane``) and by hand (``python -m perseus_sim.cluster.control_plane --kubeconfig
out/kubeconfig``). RBAC is on, certificates are made on the fly, every request is in ``audit_log``. The binaries come
from ``make control-plane`` or from KUBEBUILDER_ASSETS; nothing is built or downloaded here. It knows nothing of
Perseus. ``Layout`` defines what runs and with which files; the cluster of ``deploy/cluster`` runs the same in a
namespace.
"""

from __future__ import annotations

import argparse
import base64
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import yaml

from perseus_sim.cluster.pki import Authority, KeyPair, key_pem, private_key
from perseus_sim.processes import Child, Processes, free_port

_HOST = "127.0.0.1"
_DEFAULT_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default"
"""Pods are refused until it exists; the controller manager makes it."""
_PATIENCE = ("--node-startup-grace-period=24h", "--node-monitor-grace-period=24h")
"""Nodes are only objects here, and no kubelet renews them: all their pods would be evicted some minutes later."""
_AUTOSCALERS = "--horizontal-pod-autoscaler-sync-period=1s"
"""Instead of a quarter of a minute for each step."""
_START_TIMEOUT_S = 60.0
_BUILD_SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "control-plane" / "build.py"


class NoControlPlane(RuntimeError):
    """The binaries are missing; the message names them and says what to do."""


def find_assets() -> Path:
    """The folder of the binaries: KUBEBUILDER_ASSETS, else what ``make control-plane`` built in this checkout.

    Raises:
        NoControlPlane: a binary is missing, or their folder is not known.
    """
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if given:
        folder, remedy = Path(given), "KUBEBUILDER_ASSETS must name a folder that holds it"
    else:
        folder, remedy = _built_assets(), "run `make control-plane`, or set KUBEBUILDER_ASSETS"
    for name in ("etcd", "kube-apiserver"):
        if not os.access(folder / name, os.X_OK):
            raise NoControlPlane(f"no {name} in {folder}: {remedy}")
    return folder


def _built_assets() -> Path:
    if not _BUILD_SCRIPT.exists():
        raise NoControlPlane("perseus_sim is not in a checkout: set KUBEBUILDER_ASSETS")
    answer = subprocess.run([sys.executable, _BUILD_SCRIPT, "--where"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise NoControlPlane(f"{answer.stderr.strip()}; or set KUBEBUILDER_ASSETS")
    return Path(answer.stdout.strip())


@dataclass(frozen=True)
class Layout:
    """Where a control plane listens and stores its files; its credentials and its command lines follow from it."""

    folder: Path
    host: str
    port: int
    etcd_port: int
    peer_port: int
    hosts: tuple[str, ...] = ()
    """Further names and addresses by which clients reach the server."""
    services: str = "10.96.0.0/24"
    """The range of Services' addresses; the first is the server's own."""

    @property
    def server(self) -> str:
        return f"https://[{self.host}]:{self.port}" if ":" in self.host else f"https://{self.host}:{self.port}"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def write_credentials(self) -> Authority:
        """Certificates, keys, kubeconfigs and the audit policy, readable by this user alone; returns the authority that
        signed them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        authority = Authority("perseus-control-plane")
        own_service = str(next(ip_network(self.services).hosts()))
        hosts = (self.host, "localhost", own_service, "kubernetes.default.svc", *self.hosts)
        serving = authority.issue("kube-apiserver", hosts=tuple(dict.fromkeys(hosts)))
        admin = authority.issue("admin", organization="system:masters")
        proxies = Authority("perseus-front-proxy")
        proxy = proxies.issue("front-proxy", client=True)
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        for name, content in {
            "ca.crt": authority.certificate,
            "apiserver.crt": serving.certificate,
            "apiserver.key": serving.key,
            "accounts.key": key_pem(private_key()),
            "front-proxy-ca.crt": proxies.certificate,
            "front-proxy.crt": proxy.certificate,
            "front-proxy.key": proxy.key,
            "admin.pem": admin.certificate + admin.key,
            "audit-policy.yaml": yaml.safe_dump(policy).encode(),
            "admin.kubeconfig": kubeconfig(self.server, authority, admin),
            **{
                f"{name}.kubeconfig": kubeconfig(self.server, authority, authority.issue(f"system:{name}"))
                for name in ("kube-controller-manager", "kube-scheduler")
            },
        }.items():
            write_private(self.folder / name, content)
        return authority

    def command_lines(self, assets: Path) -> dict[str, list[str]]:
        """The processes whose binaries are there, in the order in which they start."""
        folder = self.folder
        etcd, peers = f"http://{_HOST}:{self.etcd_port}", f"http://{_HOST}:{self.peer_port}"
        commands = {
            "etcd": [
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={etcd}",
                f"--advertise-client-urls={etcd}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
                "--unsafe-no-fsync",  # survives a killed process, not a power cut: right for tests, and fast
            ],
            "kube-apiserver": [
                f"--etcd-servers={etcd}",
                f"--bind-address={self.host}",
                f"--advertise-address={self.host}",
                f"--secure-port={self.port}",
                f"--cert-dir={folder}",
                f"--tls-cert-file={folder / 'apiserver.crt'}",
                f"--tls-private-key-file={folder / 'apiserver.key'}",
                f"--client-ca-file={folder / 'ca.crt'}",
                "--authorization-mode=Node,RBAC",
                "--allow-privileged=true",
                f"--service-cluster-ip-range={self.services}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder / 'accounts.key'}",
                f"--service-account-signing-key-file={folder / 'accounts.key'}",
                # With which it passes requests on to servers of further APIs, such as metrics.
                f"--requestheader-client-ca-file={folder / 'front-proxy-ca.crt'}",
                "--requestheader-allowed-names=front-proxy",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={folder / 'front-proxy.crt'}",
                f"--proxy-client-key-file={folder / 'front-proxy.key'}",
                f"--audit-policy-file={folder / 'audit-policy.yaml'}",
                f"--audit-log-path={self.audit_log}",
                "--audit-log-mode=blocking",  # a test may read what it has just done
            ],
        }
        if (assets / "kube-controller-manager").exists():
            commands["kube-controller-manager"] = [
                f"--kubeconfig={folder / 'kube-controller-manager.kubeconfig'}",
                f"--service-account-private-key-file={folder / 'accounts.key'}",
                f"--root-ca-file={folder / 'ca.crt'}",
                "--use-service-account-credentials=true",
                "--leader-elect=false",
                "--secure-port=0",
            ]
        else:  # no controller makes service accounts, and this plugin would refuse every pod
            commands["kube-apiserver"].append("--disable-admission-plugins=ServiceAccount")
        return {name: [str(assets / name), *flags] for name, flags in commands.items()}


class ControlPlane:
    """The processes of one control plane. Each can be stopped, killed and started again on the same data and port."""

    def __init__(self, assets: Path, folder: Path, processes: Processes, api_flags: Sequence[str] = ()) -> None:
        layout = Layout(folder, _HOST, port=free_port(), etcd_port=free_port(), peer_port=free_port())
        self.assets = assets
        self.kubeconfig = folder / "admin.kubeconfig"
        self.audit_log = layout.audit_log
        self.server = layout.server
        self.children: dict[str, Child] = {}
        self._processes = processes
        layout.write_credentials()
        self._tls = ssl.create_default_context(cafile=folder / "ca.crt")
        self._tls.load_cert_chain(folder / "admin.pem")
        self._commands = layout.command_lines(assets)
        # No pods are to reach it, and since 1.37 it does not start if it shall publish a loopback address to them.
        self._commands["kube-apiserver"] += ("--endpoint-reconciler-type=none", *api_flags)
        if self.has_controllers:
            self._commands["kube-controller-manager"] += (*_PATIENCE, _AUTOSCALERS)

    @property
    def has_controllers(self) -> bool:
        """Whether there are DaemonSets, garbage collection and service accounts; setup-envtest's binaries lack them."""
        return "kube-controller-manager" in self._commands

    def start(self, name: str | None = None, *, wait: bool = True) -> None:
        """Start one process, or all, and wait until it serves, or leave that to ``await_ready``. From the main thread:
        a process ends with the thread that has started it.

        Raises:
            StartFailed: it ended or was not ready in time; the message holds the end of its log.
        """
        for each in self._commands if name is None else [name]:
            # No farewells: all state is forgotten, and an API server that has lost etcd takes its time to end.
            self.children[each] = self._processes.start(each, self._commands[each], on_our_death=signal.SIGKILL)
            if wait:
                self.await_ready(each)

    def await_ready(self, name: str) -> None:
        """Wait until a process that was started serves. Raises like ``start``."""
        if name == "kube-apiserver":  # it waits for etcd itself
            self.children[name].wait_until(lambda: self._answers("/readyz"), _START_TIMEOUT_S)
        elif name == "kube-controller-manager":
            self.children[name].wait_until(lambda: self._answers(_DEFAULT_ACCOUNT), _START_TIMEOUT_S)

    def kill(self, name: str | None = None) -> None:
        """Kill one process, or all, and wait until it is gone."""
        for each in list(self.children) if name is None else [name]:
            self.children[each].signal(signal.SIGKILL)
            self.children[each].popen.wait()

    def _answers(self, path: str) -> bool:
        try:
            direct = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)
            )
            with direct.open(self.server + path, timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def control_plane(assets: Path, folder: Path, *, api_flags: Sequence[str] = ()) -> Iterator[ControlPlane]:
    """A running control plane whose state, keys and logs are in a folder that must not be shared; gone at the end.

    Args:
        assets: folder of its binaries.
        folder: of this control plane.
        api_flags: further flags of the API server.

    Raises:
        StartFailed: a process ended or was not ready in time; nothing is left running.
    """
    with Processes(folder / "logs") as processes:
        plane = ControlPlane(assets, folder, processes, api_flags)
        try:
            plane.start()
            yield plane
        finally:
            plane.kill()


def kubeconfig(server: str, authority: Authority, user: KeyPair) -> bytes:
    """A kubeconfig that holds its certificates itself."""

    def data(pem: bytes) -> str:
        return base64.b64encode(pem).decode()

    name = "perseus-control-plane"
    document: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": name, "cluster": {"server": server, "certificate-authority-data": data(authority.certificate)}}
        ],
        "users": [
            {
                "name": name,
                "user": {"client-certificate-data": data(user.certificate), "client-key-data": data(user.key)},
            }
        ],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
        "current-context": name,
    }
    return yaml.safe_dump(document, sort_keys=False).encode()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that no other user may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def main() -> None:
    """Entry point of ``python -m perseus_sim.cluster.control_plane``."""
    parser = argparse.ArgumentParser(prog="python -m perseus_sim.cluster.control_plane", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="where to write the administrator's kubeconfig")
    path: Path = parser.parse_args().kubeconfig
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="perseus-control-plane-") as folder,
            control_plane(find_assets(), Path(folder)) as plane,
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, plane.kubeconfig.read_bytes())
            try:
                print(f"serving on {plane.server}; Ctrl-C ends it and forgets everything\n", flush=True)
                print(f"  export KUBECONFIG={path.resolve()} PATH={plane.assets}:$PATH\n", flush=True)
                while all(child.running for child in plane.children.values()):
                    time.sleep(0.5)
                ended = next(child for child in plane.children.values() if not child.running)
                sys.exit(f"{ended.name} ended:\n{ended.tail()}")
            finally:
                path.unlink()
    except NoControlPlane as error:
        sys.exit(f"control plane: {error}")
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()

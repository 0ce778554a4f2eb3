"""A real Kubernetes cluster on one machine: make it, remove it, and stop and start each of its parts.

`up` makes whatever is missing and may run again at any time. `down` removes what it finds, also after an `up` that was
killed. The package knows nothing about Perseus, so that it can fail only for reasons of Kubernetes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from local_cluster import cgroups, images, node, preflight
from local_cluster.errors import CannotRun, ClusterError, NotUp, StartFailed
from local_cluster.init import INSIDE
from local_cluster.machine import CONTROL_PLANE, PATH, Forward, Machine, end_all, environment, tail, wait_until
from local_cluster.network import IPV4, IPV6, Network, free_port
from perseus_sim.cluster.control_plane import Layout, NoControlPlane, find_assets, kubeconfig, write_private

ASSETS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl",
          "containerd", "containerd-shim-runc-v2", "ctr", "coredns", "pause")  # fmt: skip
_PORT = 6443
_DNS_IMAGE = "localhost/coredns:1"
_MANIFEST = Path(__file__).with_name("dns.yaml")


@dataclass(frozen=True)
class _Description:
    """The properties of a cluster that do not change while it is up; stored in a file of its folder."""

    nodes: int
    port: int
    """Port on this machine's loopback that leads to the API server."""
    ipv6: bool


@dataclass(frozen=True)
class Cluster:
    """A cluster, identified by the folder of its state. It may be up or not."""

    state: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for programs on this machine."""
        return self.state / "kubeconfig"

    @property
    def server(self) -> str:
        """URL of the API server, for programs in the cluster's own networks."""
        return self._layout.server

    @property
    def audit_log(self) -> Path:
        """The file in which the API server records every request that it answers."""
        return self.state / CONTROL_PLANE / "audit.log"

    @cached_property
    def assets(self) -> Path:
        """The folder of the Kubernetes binaries.

        Raises:
            CannotRun: a binary has not been built.
        """
        try:
            folder = find_assets()
        except NoControlPlane as missing:
            raise CannotRun(str(missing)) from missing
        if absent := [name for name in ASSETS if not (folder / name).exists()]:
            raise CannotRun(f"no {', '.join(absent)} in {folder}: run deploy/control-plane/build.py {' '.join(absent)}")
        return folder

    @property
    def control_plane(self) -> Machine:
        return Machine(self.state, CONTROL_PLANE)

    @property
    def nodes(self) -> list[Machine]:
        """The machines of the nodes.

        Raises:
            NotUp: there is no cluster.
        """
        return [Machine(self.state, f"node-{number}") for number in range(1, self._described().nodes + 1)]

    def machine(self, name: str) -> Machine:
        """Return a machine by its name.

        Raises:
            NotUp: there is no cluster, or no machine of that name.
        """
        machines = {each.name: each for each in (self.control_plane, *self.nodes)}
        if name not in machines:
            raise NotUp(f"no machine {name}; the machines are {', '.join(machines)}")
        return machines[name]

    # Up and down

    @property
    def ipv6(self) -> bool:
        """Whether the cluster's addresses are IPv6.

        Raises:
            NotUp: there is no cluster.
        """
        return self._described().ipv6

    @property
    def network(self) -> Network:
        """The cluster's addresses.

        Raises:
            NotUp: there is no cluster.
        """
        return IPV6 if self.ipv6 else IPV4

    def up(self, nodes: int, *, ipv6: bool = False, say: Callable[[str], None] = print) -> None:
        """Make a cluster, or start the parts of it that are missing, and wait until it is ready.

        Args:
            nodes: number of nodes, 1 to 9.
            ipv6: whether all addresses are IPv6 instead of IPv4.
            say: called with one line of text when a step is complete.

        Raises:
            CannotRun: this machine lacks something; nothing was started.
            StartFailed: a part did not start; `down` removes what was started.
        """
        if not 1 <= nodes <= 9:
            raise CannotRun("a cluster on one machine has 1 to 9 nodes")
        preflight.require(ipv6=ipv6)
        assets = self.assets
        self.state.mkdir(parents=True, exist_ok=True)
        self.state.chmod(0o711)
        with self._locked():
            self._describe(nodes, ipv6)
            machines, plane, network = self.nodes, self.control_plane, self.network
            plane.boot(Forward(self._described().port, network.hub, _PORT))
            network.build_hub(plane)
            for name in self._plane_commands():
                self.start(CONTROL_PLANE, name)
            say("the control plane answers")
            for machine in machines:
                if machine.pid is None:  # a kubelet waits 3 s for each container of which it finds an old group
                    cgroups.remove(f"{self.group}/{machine.name}")
                machine.boot()
            network.connect(plane, machines)
            self._wrap_images()
            snapshotter = preflight.snapshotter(self.state)
            for machine in machines:
                self._node(machine, network).write(
                    cgroup=cgroups.make(self.group, machine.name), snapshotter=snapshotter
                )
                self.start(machine.name, node.CONTAINERD)
                self._load_missing(machine)
                for name in (node.KUBELET, node.PROXY):
                    self.start(machine.name, name)
            manifest = _MANIFEST.read_text(encoding="utf-8")
            self.kubectl(
                "apply", "-f", "-", stdin=manifest.replace("IMAGE", _DNS_IMAGE).replace("ADDRESS", network.dns)
            )
            self.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=120s")
            say(f"{len(machines)} nodes are ready")
            self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s")
            say(f"the cluster resolves names; its binaries are in {assets}")

    def down(self) -> None:
        """Remove everything of the cluster: processes, mounts, networks, control groups and files.

        Raises:
            CannotRun: this process is not root.
            StartFailed: another program uses a part of it.
        """
        if self.state.exists() and os.geteuid() != 0:
            raise CannotRun("removing a cluster needs root, as making it did: use sudo")
        end_all(self.state)
        cgroups.remove(self.group)
        if self.state.exists():
            if mounted := [line.split()[1] for line in _mounts() if line.split()[1].startswith(f"{self.state}/")]:
                raise StartFailed(f"{mounted[0]} was mounted by another program: unmount it first")
            self._description.unlink(missing_ok=True)  # first: after an interrupted `down`, `up` must not use leftovers
            shutil.rmtree(self.state)

    # Its parts

    def components(self, machine: str) -> list[str]:
        """Return the names of a machine's parts, in the order in which they start."""
        return list(self._commands(self.machine(machine)))

    def start(self, machine: str, component: str) -> None:
        """Start a part of the cluster unless it runs, and wait until it is ready.

        Raises:
            NotUp: there is no such machine or part.
            StartFailed: it ended, or was not ready in time.
        """
        where = self.machine(machine)
        command = self._command(where, component)
        if not where.supervises(command[0]):
            where.spawn(component, command, {"PATH": f"{self.assets}:{PATH}"})
            wait_until(lambda: where.supervises(command[0]), f"{component} of {machine} to start", 30)

        def ready() -> bool:
            if not where.supervises(command[0]):
                raise StartFailed(f"{component} of {machine} ended:\n{tail(where.log(component))}")
            return bool(where.find(command[0])) and self._serves(where, component)

        try:
            wait_until(ready, f"{component} of {machine}", 120)
        except StartFailed as failed:
            raise StartFailed(f"{failed}\n{tail(where.log(component))}") from failed

    def signal(self, machine: str, component: str, number: signal.Signals) -> int:
        """Send a signal to a part of the cluster. After SIGKILL, return only when it has ended.

        Returns:
            Number of processes that got the signal.
        """
        where = self.machine(machine)
        return where.signal(self._command(where, component)[0], number)

    def running(self, machine: str, component: str) -> bool:
        where = self.machine(machine)
        return bool(where.find(self._command(where, component)[0]))

    def load(self, archive: Path) -> dict[str, list[str]]:
        """Load an archive of images into every node.

        Returns:
            Names of the loaded images, by node.
        """
        with ThreadPoolExecutor() as pool:
            loading = {each.name: pool.submit(images.load, each, self.assets / "ctr", archive) for each in self.nodes}
        return {name: loaded.result() for name, loaded in loading.items()}

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl as administrator and return its output.

        Raises:
            ClusterError: kubectl failed; the message holds its output.
        """
        command = [str(self.assets / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), input=stdin)
        if ran.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments[:4])}: {(ran.stderr or ran.stdout).strip()}")
        return ran.stdout

    # Implementation

    @property
    def group(self) -> str:
        """Name of the cluster's control group: unique on this machine, because it is a hash of the folder."""
        return f"cluster-{hashlib.sha256(str(self.state).encode()).hexdigest()[:8]}"

    @property
    def _layout(self) -> Layout:
        return _layout_in(INSIDE / CONTROL_PLANE, self.network)

    @property
    def _description(self) -> Path:
        return self.state / "cluster.json"

    def _described(self) -> _Description:
        try:
            return _Description(**json.loads(self._description.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise NotUp(f"there is no cluster in {self.state}: make one with `up`") from None

    def _describe(self, nodes: int, ipv6: bool) -> None:
        """Choose and store what does not change: keys, port, number of nodes and addresses.

        The description is written last. A folder without one is not a cluster, and everything in it is made again.
        """
        try:
            existing = self._described()
        except NotUp:
            pass
        else:
            if (existing.nodes, existing.ipv6) != (nodes, ipv6):
                family = "IPv6" if existing.ipv6 else "IPv4"
                found = f"{existing.nodes} nodes and {family}"
                raise CannotRun(f"the cluster in {self.state} has {found}: take it down first")
            return
        for leftover in self.state.iterdir():  # from a `down` or an `up` that was killed
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        described, network = _Description(nodes, free_port(), ipv6), IPV6 if ipv6 else IPV4
        outside = _layout_in(self.state / CONTROL_PLANE, network)
        authority = outside.write_credentials()
        to_kubelets = authority.issue("kube-apiserver-kubelet-client", organization="system:masters")
        write_private(outside.folder / "kubelet-client.crt", to_kubelets.certificate)
        write_private(outside.folder / "kubelet-client.key", to_kubelets.key)
        for number in range(1, nodes + 1):
            self._node(Machine(self.state, f"node-{number}"), network).write_credentials(authority, outside.server)
        admin = authority.issue("admin", organization="system:masters")
        write_private(self.kubeconfig, kubeconfig(f"https://127.0.0.1:{described.port}", authority, admin))
        partial = self._description.with_suffix(".new")
        partial.write_text(json.dumps(asdict(described)), encoding="utf-8")
        partial.replace(self._description)

    def _node(self, machine: Machine, network: Network) -> node.Node:
        return node.Node(machine, number=int(machine.name.rpartition("-")[2]), assets=self.assets, network=network)

    def _plane_commands(self) -> dict[str, list[str]]:
        folder = self._layout.folder
        commands = self._layout.command_lines(self.assets)
        commands["kube-apiserver"] += [
            "--enable-admission-plugins=NodeRestriction",
            "--enable-aggregator-routing=true",  # reach webhooks in pods without a kube-proxy beside the API server
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
            f"--kubelet-client-key={folder / 'kubelet-client.key'}",
            f"--kubelet-certificate-authority={folder / 'ca.crt'}",
        ]
        # By default it sends 20 requests a second: it would need five seconds to make the service accounts,
        # without which the API server refuses pods.
        commands["kube-controller-manager"] += ["--kube-api-qps=200", "--kube-api-burst=400"]
        scheduler = [f"--kubeconfig={folder / 'kube-scheduler.kubeconfig'}", "--leader-elect=false", "--secure-port=0"]
        return {**commands, "kube-scheduler": [str(self.assets / "kube-scheduler"), *scheduler]}

    def _commands(self, machine: Machine) -> dict[str, list[str]]:
        return (
            self._plane_commands()
            if machine.name == CONTROL_PLANE
            else self._node(machine, self.network).command_lines()
        )

    def _command(self, machine: Machine, component: str) -> list[str]:
        commands = self._commands(machine)
        if component not in commands:
            raise NotUp(f"no {component} on {machine.name}; its parts are {', '.join(commands)}")
        return commands[component]

    def _serves(self, machine: Machine, component: str) -> bool:
        """Return whether a part is ready. For a part on which no other part waits, it is enough that it runs."""
        if component == "kube-apiserver":
            return self._answers("/readyz")
        if component == "kube-controller-manager":  # the API server refuses pods until this account exists
            return self._answers("/api/v1/namespaces/default/serviceaccounts/default")
        if component == node.CONTAINERD:
            ctr = str(self.assets / "ctr")
            return machine.run(ctr, "--address", images.SOCKET, "version", check=False).returncode == 0
        return True

    def _answers(self, path: str) -> bool:
        try:
            return bool(self.kubectl("get", "--raw", path, "--request-timeout=5s"))
        except ClusterError:
            return False

    def _wrap_images(self) -> None:
        for binary, name in (("pause", node.SANDBOX_IMAGE), ("coredns", _DNS_IMAGE)):
            archive = self.state / f"{binary}.tar"
            if not archive.exists():
                partial = archive.with_suffix(".new")
                images.wrap(self.assets / binary, name, partial)
                partial.replace(archive)

    def _load_missing(self, machine: Machine) -> None:
        loaded = images.names(machine, self.assets / "ctr")
        for binary, name in (("pause", node.SANDBOX_IMAGE), ("coredns", _DNS_IMAGE)):
            if name not in loaded:
                images.load(machine, self.assets / "ctr", self.state / f"{binary}.tar")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self.state, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise CannotRun(f"another `up` is running in {self.state}: wait until it ends") from None
        finally:
            os.close(folder)


def _layout_in(folder: Path, network: Network) -> Layout:
    return Layout(folder, network.hub, _PORT, 2379, 2380, hosts=("127.0.0.1",), services=network.services)


def _mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()

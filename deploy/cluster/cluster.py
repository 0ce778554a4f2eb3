#!/usr/bin/env python3
"""Make, inspect and remove a real Kubernetes cluster on this machine.

It needs root, the virtual environment of `make setup` and the binaries of `deploy/control-plane/build.py`. The command
`check` lists everything else that is missing, and needs none of these.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from local_cluster.errors import ClusterError, NotUp
from local_cluster.machine import CONTROL_PLANE, default_state
from local_cluster.preflight import require

if TYPE_CHECKING:
    from local_cluster.cluster import Cluster

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "pause": signal.SIGSTOP, "resume": signal.SIGCONT}


def main() -> None:
    parser = argparse.ArgumentParser(description="A real Kubernetes cluster on this machine, in kernel namespaces.")
    parser.add_argument(
        "--state", type=Path, default=default_state(), help="its folder (PERSEUS_CLUSTER; default: %(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="list what this machine lacks to run a cluster; change nothing")
    up = commands.add_parser("up", help="make the cluster, or start the parts of it that are missing")
    up.add_argument("--nodes", type=int, default=2, help="number of nodes, 1 to 9 (default: 2)")
    for command in (check, up):
        command.add_argument("--ipv6", action="store_true", help="use only IPv6 addresses, instead of only IPv4")
    commands.add_parser("down", help="remove the cluster: processes, mounts, networks, control groups and files")
    commands.add_parser("status", help="list the machines and parts, and whether they run")
    load = commands.add_parser("load", help="load images, in the format of `docker save`, into every node")
    load.add_argument("archive", type=Path, nargs="+")
    execute = commands.add_parser("exec", help="run a command in a machine: exec node-1 -- ip address")
    execute.add_argument("machine")
    execute.add_argument("argument", nargs=argparse.REMAINDER)
    for name in (*_SIGNALS, "start"):
        of_part = commands.add_parser(name, help=f"{name} a part: {name} node-1 kubelet, {name} {CONTROL_PLANE} etcd")
        of_part.add_argument("machine")
        of_part.add_argument("component")
    arguments = parser.parse_args()
    try:
        if arguments.command == "check":
            require(ipv6=arguments.ipv6)
            print("this machine can hold a cluster")
            return
        from local_cluster.cluster import Cluster  # it needs the virtual environment

        _run(Cluster(arguments.state.resolve()), arguments)
    except ClusterError as error:
        sys.exit(f"cluster: {error}")


def _run(cluster: Cluster, arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "up":
            started = time.monotonic()
            cluster.up(
                arguments.nodes,
                ipv6=arguments.ipv6,
                say=lambda text: print(f"{time.monotonic() - started:5.0f} s  {text}", flush=True),
            )
            print(f"\n  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.assets}:$PATH\n  kubectl get nodes\n")
        case "down":
            cluster.down()
        case "status":
            _print_status(cluster)
        case "load":
            for archive in arguments.archive:
                for name, loaded in cluster.load(archive).items():
                    print(f"{name}: {', '.join(loaded)}")
        case "exec":
            command = arguments.argument[1:] if arguments.argument[:1] == ["--"] else arguments.argument
            prefix = cluster.machine(arguments.machine).enter()
            os.execvp(prefix[0], [*prefix, *(command or ["bash"])])  # noqa: S606 - the user's own command
        case "start":
            cluster.start(arguments.machine, arguments.component)
        case name:
            if not cluster.signal(arguments.machine, arguments.component, _SIGNALS[name]):
                raise NotUp(f"{arguments.component} of {arguments.machine} is not running: nothing was signalled")


def _print_status(cluster: Cluster) -> None:
    for machine in (cluster.control_plane, *cluster.nodes):
        state = f"process {machine.pid}" if machine.pid else "not running"
        print(f"{machine.name}: {state}")
        for component in cluster.components(machine.name) if machine.pid else ():
            print(f"  {component}: {'running' if cluster.running(machine.name, component) else 'not running'}")
    print(f"kubeconfig: {cluster.kubeconfig}\naudit log: {cluster.audit_log}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A real Kubernetes cluster on this machine: usage below. Called by `make cluster` and by people.

Needs root, the virtual environment of `make setup` and the binaries of `build.py`; `check` says what else is missing.
"""

# ruff: noqa: T201  # a script that speaks to people

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from local_cluster.cluster import CONTROL_PLANE, Cluster, default_state
from local_cluster.errors import ClusterError, NotUp
from local_cluster.preflight import require

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "pause": signal.SIGSTOP, "resume": signal.SIGCONT}


def main() -> None:
    parser = argparse.ArgumentParser(description="A real Kubernetes cluster on this machine, in namespaces.")
    parser.add_argument("--state", type=Path, default=default_state(), help="its folder (PERSEUS_CLUSTER; %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="say what this machine lacks to hold a cluster, and change nothing")
    up = commands.add_parser("up", help="make the cluster, or what is missing of it")
    up.add_argument("--nodes", type=int, default=2, help="how many (default: 2)")
    for command in (check, up):
        command.add_argument("--ipv6", action="store_true", help="with addresses of IPv6 alone, instead of IPv4")
    commands.add_parser("down", help="remove it and everything of it")
    commands.add_parser("status", help="say what runs")
    load = commands.add_parser("load", help="bring images, as `docker save` writes them, to every node")
    load.add_argument("archive", type=Path, nargs="+")
    execute = commands.add_parser("exec", help="run a command on a machine: exec node-1 -- ip address")
    execute.add_argument("machine")
    execute.add_argument("argument", nargs=argparse.REMAINDER)
    for name in (*_SIGNALS, "start"):
        of_part = commands.add_parser(name, help=f"{name} a part: {name} node-1 kubelet, {name} {CONTROL_PLANE} etcd")
        of_part.add_argument("machine")
        of_part.add_argument("component")
    given = parser.parse_args()
    try:
        _obey(Cluster(given.state.resolve()), given)
    except ClusterError as error:
        sys.exit(f"cluster: {error}")


def _obey(cluster: Cluster, given: argparse.Namespace) -> None:
    match given.command:
        case "check":
            require(ipv6=given.ipv6)
            print("this machine can hold a cluster")
        case "up":
            started = time.monotonic()
            cluster.up(
                given.nodes,
                ipv6=given.ipv6,
                say=lambda words: print(f"{time.monotonic() - started:5.0f} s  {words}", flush=True),
            )
            print(f"\n  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.assets}:$PATH\n  kubectl get nodes\n")
        case "down":
            cluster.down()
        case "status":
            _report(cluster)
        case "load":
            for archive in given.archive:
                for name, loaded in cluster.load(archive).items():
                    print(f"{name}: {', '.join(loaded)}")
        case "exec":
            command = given.argument[1:] if given.argument[:1] == ["--"] else given.argument
            entering = cluster.machine(given.machine).enter()
            os.execvp(entering[0], [*entering, *(command or ["bash"])])  # noqa: S606 - what a shell would do
        case "start":
            cluster.start(given.machine, given.component)
        case name:
            if not cluster.signal(given.machine, given.component, _SIGNALS[name]):
                raise NotUp(f"{given.component} of {given.machine} does not run")


def _report(cluster: Cluster) -> None:
    for machine in (cluster.control_plane, *cluster.nodes):
        standing = f"process {machine.pid}" if machine.pid else "not running"
        print(f"{machine.name}: {standing}")
        for component in cluster.components(machine.name) if machine.pid else ():
            print(f"  {component}: {'running' if cluster.running(machine.name, component) else 'not running'}")
    print(f"kubeconfig: {cluster.kubeconfig}\naudit log: {cluster.audit_log}")


if __name__ == "__main__":
    main()

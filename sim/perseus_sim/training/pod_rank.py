"""One rank of a simulated training job whose ranks are spread over pods: ``python -m perseus_sim.training.pod_rank``.

Each GPU of a pod has one. It finds the job's coordinator, connects to its neighbours over the pods' network, and then
is a ``rank.SimulatedRank`` that follows real time on a GPU behind NVML. It connects to the agent at PERSEUS_SOCKET like
any training process. Standard library only, as several start at once.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from perseus_core.units import us_from_ns
from perseus_sim.gpus.shim_gpu import NoGpus, ShimGpu
from perseus_sim.training.rank import JobLost
from perseus_sim.training.run_ahead import make_rank

NEIGHBOUR_TIMEOUT_S: Final = 120.0
"""Longest wait for the coordinator and for neighbours, whose pods may still be fetching their image."""
_RETRY_S: Final = 0.2
_SAME_CLOCK_US: Final = 50_000
"""Clocks that differ by less are one clock, read at different moments."""


def dial(host: str, port: int) -> socket.socket:
    """Connect as soon as the other side listens.

    Raises:
        JobLost: nothing listens within ``NEIGHBOUR_TIMEOUT_S``.
    """
    deadline_s = time.monotonic() + NEIGHBOUR_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=NEIGHBOUR_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise JobLost(f"nothing listens on {host}:{port}: {error}") from error
            time.sleep(_RETRY_S)
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def listen(port: int) -> socket.socket:
    """A listener that pods reach whatever the family of their addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=256)


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message as one line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Receive the next line, and not a byte more: another reader continues from there.

    Raises:
        JobLost: the other side has closed the connection.
    """
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(65_536, socket.MSG_PEEK)
        if not chunk:
            raise JobLost("the other side has closed the connection")
        line += connection.recv(chunk.find(b"\n") + 1 or len(chunk))
    message: dict[str, Any] = json.loads(line)
    return message


def join(master: tuple[str, int], rank: int, uuid: str) -> dict[str, Any]:
    """The specification of this rank, as ``make_rank`` takes it, connected to its neighbours.

    Raises:
        JobLost: the job fell apart before it began.
    """
    with listen(0) as listener:
        listener.settimeout(NEIGHBOUR_TIMEOUT_S)
        parent = dial(*master)
        send_message(parent, {"rank": rank, "port": listener.getsockname()[1], "gpu": uuid})
        spec = receive_message(parent)
        peers: dict[int, socket.socket] = {}
        for stage, (host, port) in spec.pop("dial"):
            peers[stage] = dial(host, port)
            send_message(peers[stage], {"stage": spec["stage"]})
        while len(peers) < spec["neighbours"]:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(NEIGHBOUR_TIMEOUT_S)
            peers[receive_message(connection)["stage"]] = connection
    ahead_us = us_from_ns(time.monotonic_ns()) - spec.pop("now_us")
    spec["offset_us"] = 0 if abs(ahead_us) < _SAME_CLOCK_US else ahead_us
    for connection in (parent, *peers.values()):
        connection.settimeout(None)
    spec["parent"] = parent.detach()
    spec["peers"] = {stage: connection.detach() for stage, connection in peers.items()}
    return spec


def main() -> int:
    """Entry point, with host, port, rank, folder and UUID of the GPU: 0: stopped on request; 3: the job has ended
    around this rank."""
    host, port, rank, folder, uuid = sys.argv[1:]
    try:
        gpu = ShimGpu(Path(folder), uuid)
    except NoGpus as error:
        print(f"perseus_sim.training.pod_rank: {error}", file=sys.stderr)
        return 2
    try:
        make_rank(join((host, int(port)), int(rank), uuid), gpu).run()
    except (JobLost, OSError) as error:
        print(f"rank {rank}: {error or 'the job fell apart'}", file=sys.stderr)
        return 3
    finally:
        gpu.rest()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The agent of one node: the only program of Perseus that sets its GPUs' clocks.

    operator ──gRPC──────────► servers.grpc_service ──► node.node ──► clocks.gpu_worker ──► devices
    trainer ───Unix socket───► servers.local_socket ──────┘ ▲         one thread for each GPU
    kubelet, kernel ─────────► pods ────────────────────────┘

1. A training process connects to the socket and says its rank and its schedule. ``pods`` asks the kernel which pod it
   is in, and the kubelet which GPUs that pod has: nothing that the process says about itself is believed.
2. The operator acquires a lease, which names pods, and sends plans. ``node`` joins leases, processes and GPUs, under
   one lock and without waiting: to the threads of GPUs it leaves commands.
3. The thread of a GPU asks its follower which clock is wanted now. That of a rank (``clocks.rank_follower``) reads the
   marks in the memory that it shares with the process, and asks early by a timetable. ``clocks.governor`` decides what
   may be written, ``clocks.call_queue`` when; before the first lock the GPU is in the journal (``clocks.journal``).
4. What an iteration took, in time and energy, becomes a report (``clocks.iteration_reports``), goes into bounded queues
   (``clocks.telemetry``), and as a stream to the operator.
5. Whatever ends, a lease, a connection or the agent, its GPUs return to their default clocks. If the agent cannot do it
   any more, the keeper does (``keeper``, a process of its own).

A serving engine takes the same way. It connects as a rank does, or ``perseus_reader`` reads its metrics page. Its
followers are those of ``serving``: they decide by the load and the table that the operator has ordered, for all GPUs of
the engine together. What it did in each second is a window, and goes where iteration reports go.

Begin with ``node.node``, then ``clocks.gpu_worker``; ``lifecycle`` shows what is started in which order.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("perseus-k8s")
except PackageNotFoundError:  # run from a bare checkout
    __version__ = "0+unknown"

"""The agent of one node: the only program of Perseus that sets its GPUs' clocks.

operator ──gRPC──► servers.grpc_service ──────► node ──► clocks.gpu_worker (one thread per GPU) ──► devices
trainer ──Unix socket──► servers.local_socket ──┘         └─ rank_follower, governor (policy), energy
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("perseus-k8s")
except PackageNotFoundError:  # run from a bare checkout
    __version__ = "0+unknown"

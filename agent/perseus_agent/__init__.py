"""The privileged hand on one node: the only writer of its GPUs' clocks.

operator ──gRPC──► service ──► node ──► worker (one thread per GPU) ──► device
trainer ──Unix socket──► local_server ──┘      └─ pilot (follows the rank), governor (policy), energy
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("perseus-k8s")
except PackageNotFoundError:  # run from a bare checkout
    __version__ = "0+unknown"

"""The simulator: stand-ins for what a machine without GPUs and without a cluster lacks, for the demo and for tests.

    gpus        a GPU as a shared file, the agent's driver for it, how time and power follow the clock; a kubelet
    training    training processes that really run their schedule through the client, in virtual time
    apiserver   an embedded Kubernetes API server
    cluster     a cluster on one machine: the parts above and the production processes, started and stopped together
    demo        ``make demo`` and its report
    processes   child processes that never outlive their parent

The simulator may import every other room, and no other room may import it. Nothing here decides what a production
process does.
"""

"""The simulator: doubles for what a machine without GPUs and without a cluster lacks, for the demo and for tests.

    cluster        a cluster on one machine: the parts below and the production processes, started and stopped together
    job, trainer   training processes that really run their schedule through the client, in virtual time
    shared_gpu, gpu, model   a GPU as a shared file, the agent's driver for it, and how time and power follow the clock
    kubelet        PodResources and /proc as an agent sees them
    device_plugin  the GPUs offered to the kubelet of a real node, where the chart simulates them
    apiserver      an embedded Kubernetes API server
    processes      child processes that never outlive their parent

It may import every other room, and no other room may import it. Nothing here decides what a production process does.
"""

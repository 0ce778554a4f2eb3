"""The simulator: stand-ins for what a machine without GPUs and without a cluster lacks, for the demo and for tests.

The programs are the production ones. What is replaced lies below them and around them:

    apiserver   an embedded Kubernetes API server         ◄── operator, kubectl
    gpus        a GPU as a shared file, with its physics  ◄── agent (``--devices``), and the ranks that run on it;
                and a kubelet                             ◄── agent
    training    training processes: each runs its schedule through the real client, in virtual time
    serving     requests and their traces, and engines that serve them
    cluster     a cluster on one machine: all of these and the production processes, started and stopped together
    demo        ``make demo`` and its report
    processes   child processes that never outlive their parent
    profiles    profiles of made-up models, from the figures of the simulated GPUs
    commands    what is added to the ``perseus`` command

A simulated iteration: a rank (``training.rank``) marks an instruction by the client, the agent sees the mark and writes
a clock into the GPU's file, and the instruction takes the time and the energy that the GPU needs at that clock.
``training.coordinator`` lets the next iteration begin when all ranks have ended theirs.

The simulator may import every other room, and no other room may import it. Nothing here decides what a production
process does. Begin with ``cluster.simulated_cluster``, which puts everything together, or with
``gpus.shared_gpu``.
"""

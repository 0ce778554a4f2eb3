"""The solver service: a worker without state that solves frontiers for operators, in a pod of its own.

    operator (clients.solvers) ──Work, mutual TLS──► service ──► one worker process (solving.process)

It has neither kopf nor a Kubernetes client, and no rights in the cluster. Operators decide whose turn it is; a worker
does one piece of work at a time, so that its container's memory is one solve's.
"""

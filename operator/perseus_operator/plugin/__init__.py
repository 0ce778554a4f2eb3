"""``kubectl perseus``: what a job's owner asks from a terminal. Reads PerseusJobs and their frontiers, rewrites one
annotation; everything with the rights of whoever calls it, nothing through the operator.

``cli`` is the door to the terminal, ``door`` that to the cluster; between them everything is pure.
"""

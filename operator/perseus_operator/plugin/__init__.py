"""``kubectl perseus``: frontiers, plans and stragglers of PerseusJobs, from a terminal.

It reads PerseusJobs and their frontiers and rewrites one annotation. It talks to the API server alone, with the rights
of the user's kubeconfig. ``cli`` reads arguments and writes output, ``kube_client`` calls the API server; the modules
between them compute without side effects.
"""

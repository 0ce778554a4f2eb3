"""Clients of the two services that the operator calls: the API server (``kube``) and the node agents (``agents``)."""

"""Clusters on one machine: API servers, nodes with agents, certificates and access rights."""

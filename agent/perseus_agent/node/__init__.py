"""Leases, training processes and GPUs of one node, joined."""

"""Simulated GPUs: their physics, their state in shared files, and how agents and kubelets meet them."""

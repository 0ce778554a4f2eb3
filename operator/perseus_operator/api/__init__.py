"""The Kubernetes API of Perseus: its custom resources as typed Python classes, and the conditions that they report."""

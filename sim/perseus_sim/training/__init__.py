"""Simulated training jobs: ranks that execute their stage's schedule through the real client."""

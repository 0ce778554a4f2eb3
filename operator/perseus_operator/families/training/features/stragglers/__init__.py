"""Slow pipelines, declared and detected, and what slows them."""

"""The control loops: one runner for each job, and what it starts. Decisions are made in ``planning``."""

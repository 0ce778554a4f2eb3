"""The control loops: one runner for each job, and what it starts. Decisions are its family's."""

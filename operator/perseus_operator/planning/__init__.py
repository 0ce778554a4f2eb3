"""What to do next about a job, and what to say about it: pure functions on values.

Nothing here does I/O, reads a clock or waits; an import contract keeps it so. ``planner`` decides about one job,
``power_budget`` about the watts that several jobs share.
"""

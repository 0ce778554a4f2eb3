"""The profile of a job: measured by a sweep, estimated from what is observed, or read."""

"""Several replicas of the operator: which serves which job, and under which epoch."""

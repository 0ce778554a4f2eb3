"""What the agent serves: gRPC to the operator, a Unix socket to training processes, metrics and probes over HTTP."""

"""A job without a plan: one clock for all its GPUs."""

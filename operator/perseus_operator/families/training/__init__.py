"""Training: plans of the time-energy frontier, one clock for each instruction. A folder for each feature."""

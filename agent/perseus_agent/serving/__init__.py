"""What follows an engine's load with the clocks of its GPUs."""

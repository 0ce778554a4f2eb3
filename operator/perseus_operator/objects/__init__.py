"""Plain values that travel between packages, and objects of the cluster whose status is kept."""

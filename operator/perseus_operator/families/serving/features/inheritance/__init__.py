"""What other pools, or this one under an operator before, have measured of the same engine."""

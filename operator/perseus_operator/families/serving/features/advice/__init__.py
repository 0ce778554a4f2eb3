"""How many replicas the load needs at their highest clock: advice, since nothing here ever scales."""

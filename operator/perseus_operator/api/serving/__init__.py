"""The ServingPool: replicas of an engine whose clocks follow their load, within the limits of their requests."""

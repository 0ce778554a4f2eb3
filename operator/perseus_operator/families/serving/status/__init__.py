"""What is reported of a pool."""

"""Room sim."""

"""Room client."""

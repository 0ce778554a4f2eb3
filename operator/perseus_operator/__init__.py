"""Room operator."""

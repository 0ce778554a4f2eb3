"""The mathematics."""

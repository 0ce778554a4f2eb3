"""The solver as a service of its own."""

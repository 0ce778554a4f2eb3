"""What a plan saves, measured by interrupting it."""

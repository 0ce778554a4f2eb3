"""What the steps of an engine take at each clock, and the table that follows from it."""

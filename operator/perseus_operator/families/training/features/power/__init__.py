"""What plans draw, and what a watt is worth."""

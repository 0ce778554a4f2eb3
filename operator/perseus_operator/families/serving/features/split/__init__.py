"""How long requests are, and whether pools by length would save."""

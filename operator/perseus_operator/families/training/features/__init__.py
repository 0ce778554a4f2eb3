"""Features of training. Each is a folder: what it remembers, and what it decides by that and ``Facts``."""

"""Changes of clock: how many a plan has, and plans that need fewer of them for a bounded amount of energy."""

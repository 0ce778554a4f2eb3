"""Mode Canary: the plan on one pipeline first, then on all, or on none."""

"""PowerBudgets: what each job draws, what a watt is worth to it, and the share that it gets."""

"""What a watt is worth to a pool: the ceiling of its clocks, within its share of a PowerBudget."""

"""What the law saves, by switching single replicas back to default clocks at random."""

"""Replicas that are about to miss a limit at their highest clock, where no clock helps."""

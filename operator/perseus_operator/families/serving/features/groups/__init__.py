"""Replicas of several pods, of which only the leader's engine says what it does."""

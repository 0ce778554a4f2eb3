"""Lowered clocks beside a HorizontalPodAutoscaler of the user's own: they must not add replicas."""

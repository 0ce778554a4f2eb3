"""What plans and predictions of a job rest on."""

from __future__ import annotations

from enum import StrEnum


class PlanBasis(StrEnum):
    """What plans and predictions rest on, from the best to the worst."""

    PROFILE = "Profile"
    """The profile that the spec names, or the job's own."""
    MATCHING = "MatchingProfile"
    """Another one, of the same GPUs, driver and shape, whose instructions take as long as the job's."""
    MODEL = "Model"
    """The published curves of the GPU model, through what the job's iterations take and draw."""

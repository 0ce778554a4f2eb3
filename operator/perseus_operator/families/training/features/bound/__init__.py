"""Whether measured iterations keep the objective's bound, and what the job is held at if they do not."""

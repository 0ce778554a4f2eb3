"""The nodes of a job: what agents hold for it, what they report, and what they are to do next."""

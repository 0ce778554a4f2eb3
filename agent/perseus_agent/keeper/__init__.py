"""The clock keeper: a process of its own that watches the agent, and gives back the GPUs that it leaves locked."""

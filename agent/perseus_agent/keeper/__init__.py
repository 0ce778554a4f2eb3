"""The clock keeper: the process that starts the agent, watches it, and gives back the GPUs that it leaves locked."""

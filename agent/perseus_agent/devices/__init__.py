"""GPUs as the agent sees them: the contract (``base``) and the one door to NVML (``nvml``)."""

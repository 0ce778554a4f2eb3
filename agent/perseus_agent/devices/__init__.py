"""GPUs as the agent sees them: the contract (``base``) and its implementation with NVML (``nvml``)."""

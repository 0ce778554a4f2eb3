"""Which pod a process belongs to, and which GPUs the kubelet gave to that pod."""

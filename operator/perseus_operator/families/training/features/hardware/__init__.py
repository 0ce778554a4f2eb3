"""What the GPUs of a job are known to be, and what plans are rehearsed under."""

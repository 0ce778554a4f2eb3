"""What is reported of a training job, and restored after a restart."""

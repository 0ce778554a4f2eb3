"""What people read: conditions and figures of the status, recommendations, causes of stragglers, and metrics."""

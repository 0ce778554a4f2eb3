"""Our plans beside those that others would make from the same measurements."""

"""Which engines say what they do, and which of them are alike."""

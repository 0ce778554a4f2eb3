"""This solver's plans beside those that other methods make from the same measurements."""

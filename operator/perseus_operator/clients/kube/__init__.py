"""Calls to the API server, and their answers as plain values."""

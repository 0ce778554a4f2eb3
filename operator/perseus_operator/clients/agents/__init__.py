"""Calls to agents over gRPC, and their answers as plain values."""

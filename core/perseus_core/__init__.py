"""Words that every room shares: units, rank ids, instructions, latencies and figures of GPUs, serving, and the names of
labels and conditions.

Standard library only. It imports no other room.
"""

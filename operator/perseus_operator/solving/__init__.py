"""Frontiers and calibrations, made by worker processes: requests, the pool of workers, and their results."""

"""Simulated serving: requests and their traces, and engines as a stranger's scraper sees them."""

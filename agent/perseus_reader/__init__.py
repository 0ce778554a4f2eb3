"""Reads the metrics pages of serving engines for the agent: a process of its own, without privileges.

The process that may set clocks reads no byte that a tenant has written. This one has no GPU, no right in the cluster
and no file of the agent's; what it makes of a page are the bounded counts that an engine with the plugin writes itself.
"""

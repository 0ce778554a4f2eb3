"""The words every process of Perseus shares: wire messages, units, and names of labels and conditions.

Everybody imports this room; it imports nobody. ``units``, ``keys``, ``hello`` and ``channel`` need the standard library
alone; the generated stubs are never edited by hand (``make generate``).
"""

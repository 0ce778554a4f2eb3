"""What all programs of Perseus share: wire messages, rank ids, units, settings, logs, and names of labels and
conditions.

Every other package may import this one; it imports none of them. Apart from ``tls``, ``planset`` and the generated
stubs, its modules need the standard library alone. Generated stubs are never edited by hand (``make generate``).
"""

"""The words every process of Perseus shares: wire messages, units, and names of labels and conditions.

Everybody imports this room; it imports nobody. ``units`` and ``keys`` cost no protobuf import; the generated stubs live in
``perseus_proto.v1alpha1`` and are never edited by hand (``make generate``).
"""

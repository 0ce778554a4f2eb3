"""The wire: messages between our programs, and what a rank and its agent share.

It imports `perseus_core` and no other room. Apart from ``planset``, ``device_plugin`` and the generated stubs, its
modules need the standard library alone. Generated stubs are never edited by hand (``make generate``).
"""

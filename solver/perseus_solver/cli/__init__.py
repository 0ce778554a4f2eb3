"""The ``perseus`` command: plan offline from a profile CSV."""

"""Online profiling: which clocks to measure (``sweep``), what is known of them (``reading``), whether a profile still
fits (``drift``), and how far it has got (``progress``).
"""

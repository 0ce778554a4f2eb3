"""Online profiling: which clocks to measure (``sweep``), and whether a profile still fits (``drift``)."""

"""``perseus-bench``, the acceptance run: measures on one GPU what the project promises about clocks; writes a report.

For somebody who may set clocks on one GPU for ten minutes. ``kit.accept`` runs five trials on a ``bench.Bench`` (the
GPU behind the device contract, a workload, a way to wait): ``calls``, ``plateau``, ``switches``, ``restoration`` and
``pipeline``. Each returns plain values of ``report``; ``measures`` holds the statistics, without I/O. ``command`` is
the command line: it refuses a GPU that is not free, and returns the clocks whatever happens.
"""

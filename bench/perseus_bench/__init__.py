"""``perseus-bench``, the acceptance run: measures on one GPU what the project promises about clocks; writes a report.

For somebody who may set clocks on one GPU for ten minutes. A run takes this way:

    command ──► kit.accept ──► calls ──► plateau ──► switches ──► pipeline ──► restoration ──► report, markdown
                   │ on a ``bench.Bench``: the GPU behind the agent's device contract, a workload, a way to wait

1. ``command`` reads the arguments, refuses a GPU that is not free, and returns the clocks whatever happens.
2. ``kit.accept`` runs five trials in turn. Each returns plain values of ``report``; ``measures`` holds the statistics,
   without I/O.
3. What computes is a ``workload``; ``workload_choice`` makes it by the option ``--workload``.

Begin with ``kit``.
"""

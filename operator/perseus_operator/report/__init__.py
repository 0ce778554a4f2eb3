"""Reports of energy that finance and auditors take.

``usage`` reads from the site's Prometheus what jobs and pools took and did in each hour; ``factors`` and
``electricity_maps`` read prices, carbon and overheads, each with its source. Together they are a ``Statement``, and
every figure follows from it (``figures``). ``stored`` writes and reads it as a file with its digest; ``table``,
``rows_csv``, ``spdx``, ``focus`` and ``annex_xi`` write what follows. ``command`` has the arguments.
"""

"""The relaxation of the planning problem, and its exact solution by network flows.

``tables`` and ``graph`` turn a problem into arrays in integer time, and ``curve`` chooses how its relaxed frontier is
found: exactly, by a network simplex on the whole graph from one deadline to the next (``whole``, ``simplex``); or,
where a long schedule repeats (``periods``), at prices of time with flows of one block and of the ends (``composed``,
``steady``, ``network``). ``flow`` is the only module that imports OR-Tools' minimum-cost flow. Certificates are checked
in ``certify``, which shares no code with this package.
"""

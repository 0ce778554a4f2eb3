"""The relaxation of the planning problem, and its exact solution by network flows.

``tables`` and ``graph`` turn a problem into arrays in integer time, ``network`` into flows, which a network simplex
solves (``simplex``). ``curve`` chooses how the relaxed frontier is found: on the whole graph, from one deadline to the
next (``whole``); or, where a long schedule repeats (``periods``), at prices of time, with flows of one block and of the
ends (``composed``, ``steady``). ``timetables`` belong to flows. ``flow`` is the only module that imports OR-Tools'
minimum-cost flow. Certificates are checked in ``certify``, which shares no code with this package.
"""

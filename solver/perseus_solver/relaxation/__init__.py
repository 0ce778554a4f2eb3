"""The engine: the relaxation of the planning problem and its exact solution by network flows.

``tables`` and ``graph`` turn a problem into arrays, ``flow`` and ``linear`` are the only doors to OR-Tools,
``relaxation`` solves one price or one deadline. Called by ``frontier`` and ``rounding``; certificates are checked
elsewhere (``certify``), by code that shares nothing with this package.
"""

"""The relaxation of the planning problem, and its exact solution by network flows.

``tables`` and ``graph`` turn a problem into arrays in integer time, ``network`` builds and solves the dual network at
one price, and ``curve`` samples the whole relaxed frontier. Where a schedule repeats (``periods``), ``steady`` solves
one block instead of all. ``flow`` is the only module that imports OR-Tools' minimum-cost flow. Certificates are checked
in ``certify``, which shares no code with this package.
"""

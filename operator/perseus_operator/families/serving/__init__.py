"""A pool of replicas that serve: the clock of each follows its load, by a table that one of them is measured for.

windows ──► ServingPool: signals, model, trials, ... ──► decide ──► orders for agents, a fit
                 ▲                                                          │
                 └──────────────── work: the fit, in a thread ◄─────────────┘
"""

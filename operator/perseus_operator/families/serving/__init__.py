"""A pool of replicas that serve: the clock of each follows its load, by a table that one of them is measured for.

agents' windows ──► ServingPool: signals, exploration, model, objective ──► decide ──► Intent (orders), Fit
                                  ▲                                                    │
                                  └──────────────── work: fit, in a thread ◄───────────┘
"""

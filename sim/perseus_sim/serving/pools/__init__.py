"""Pools of replicas over a week: a made-up load of the published shape, policies that size them, and what comes of it.

`Service` splits a trace's requests into classes by length, and `Service.week` makes the load of weeks, minute by
minute. A policy (`policies`) says what serves each pool in each minute; `fluid` says what that draws and how many
requests keep their limits. A week of requests cannot be served one by one in the simulator, so minutes are taken as
steady; a test compares them with the engines of `perseus_sim.serving.fleet`.
"""

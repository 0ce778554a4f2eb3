"""Execution of a pipeline in virtual time, event by event: hosts, launch queues, GPUs, driver locks, and a control.

    Executor(pipeline, machine, control).run(iterations) ── Outcome

One process, one thread, the same for the same seed. The control decides about clocks: one without latency as the
reference, the host's end marks, or the agent's real timetable. It shares no code with ``perseus_solver.rehearsal``.
"""

"""A read-only page for each PerseusJob: its frontier, what a deadline would cost and save, the pipeline by power.

``responses`` turns views of jobs into JSON, ``server`` serves that and the files in ``static``. Nothing here can change
a job: no handler reads a request body, and no function is given a client that writes.
"""

"""A read-only page for each PerseusJob: its frontier, what a deadline would cost and save, the pipeline by power.

``view`` is what the runner hands out, ``documents`` turns it into JSON, ``server`` serves that and the files in
``static``. Nothing here can change anything: no handler takes a body, and no function is given a collaborator that
writes.
"""

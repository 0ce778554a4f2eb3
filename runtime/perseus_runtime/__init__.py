"""What every process of ours needs, whatever it does.

In the order in which a process uses it:

    command_line    its arguments are parsed: an error is one line that says what was probably meant
    settings        one frozen dataclass, from which flags, environment variables and ``--help`` are made
    files           what its users' files hold is read within a limit
    logs            JSON, one object a line
    addresses       where it listens
    direct          what it reaches without the environment's proxy
    tls             mutual TLS of its gRPC services, whose certificates are renewed without a restart; ``certificate``
                    says when one ends
    http_server     probes, metrics and pages
    ready_file      says that it serves, and where

It may import ``perseus_core`` and nothing else of ours. Apart from ``tls``, its modules need the standard library
alone. Begin with ``settings``: each program declares its own there.
"""

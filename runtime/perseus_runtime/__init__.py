"""What every process of ours needs: settings, command lines, logs, TLS, addresses, an HTTP server, a ready file.

It may import `perseus_core` and nothing else of ours. Apart from ``tls``, its modules need the standard library alone.
"""

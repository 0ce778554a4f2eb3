"""What a release consists of, and how each part is made: packages, images, chart, bills, provenance, signatures.

release.py is the command line. Nothing here publishes: everything goes into one local folder, images and chart into an
OCI registry whose storage is in that folder.
"""

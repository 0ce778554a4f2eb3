"""Builds the project's images: with which program, on which bases, and what is checked of the result.

build.py is the command line. Standard library only, because it runs before there is a virtual environment.
"""

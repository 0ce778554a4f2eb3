"""The kinds of work whose clocks are set: one folder each, and the table of all."""

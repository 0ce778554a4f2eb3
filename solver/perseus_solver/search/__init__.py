"""The search for plans near the bound: the plans found so far, and the moves that improve them.

``rounding`` turns relaxed timetables into plans of measured options; ``recreate`` and ``cuts`` improve
plans; ``pool`` stores all plans with their exact figures and applies these in turn.
"""

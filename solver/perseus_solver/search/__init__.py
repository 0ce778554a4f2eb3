"""The search for plans near the bound: the plans found so far, and the moves that improve them.

``rounding`` turns relaxed timetables into plans of measured options; ``descent`` improves plans, a part at a time;
``pool`` stores all plans with their exact figures and applies these in turn; ``placement`` chooses which to keep.
"""

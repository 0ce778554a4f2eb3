"""The planning problem and what a solution means: profile, problem, result, and the exact simulator."""

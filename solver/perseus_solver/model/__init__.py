"""The planning problem and its solutions: profile, problem, exact simulator, and frontier."""

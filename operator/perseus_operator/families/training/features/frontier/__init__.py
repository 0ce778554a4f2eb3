"""The frontier of a job: its inputs, whether it is solved, and which point an objective asks for."""

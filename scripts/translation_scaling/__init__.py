"""The parts of scripts/scaling.py: the runs, their results, what the results say, and the report."""

"""Weights in and out in Hub format, and the state from which a training resumes."""

"""Load and save weights in Hub format, and the state from which a training resumes."""

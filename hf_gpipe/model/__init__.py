"""The model that a user gives: its stages, whether they are exact, and their parameters."""

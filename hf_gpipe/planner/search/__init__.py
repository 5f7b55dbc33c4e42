"""The search for the fastest plan that fits, and what is advised where none does."""

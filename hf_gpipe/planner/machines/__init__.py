"""The devices, processes and links that a plan is for."""

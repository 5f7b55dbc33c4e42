"""Texts of the behaviour of the toolkit, part by part, which `scripts/freeze.py` compares with committed results."""

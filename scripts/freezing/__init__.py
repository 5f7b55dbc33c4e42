"""What the toolkit does, part by part, as text that `scripts/freeze.py` compares with committed results."""

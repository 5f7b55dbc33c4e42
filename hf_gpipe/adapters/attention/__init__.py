"""Attention over packed documents, over parts of rows, and over rows without padding."""

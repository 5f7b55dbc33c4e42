"""Attention over packed documents, over chunks of rows, and over rows without padding."""

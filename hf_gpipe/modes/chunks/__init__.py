"""Rows that are cut into chunks of tokens, each of which is a micro-batch of the table (docs/long_rows.md)."""

"""Parallel text: corpora without leaks between splits, streams, and pairs as token ids."""

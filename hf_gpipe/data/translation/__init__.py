"""Parallel text: its parts by language, pairs without leaks between splits, streams, and pairs as token ids."""

"""Randomness and hashes that are the same in every process, on every machine, whatever PYTHONHASHSEED is."""

from __future__ import annotations

import hashlib
import random


def stable_random(*parts: object) -> random.Random:
    """A random generator that is seeded by `parts` (strings and integers), such as ("cldr", seed, language)."""
    # A string seed goes through SHA-512 inside random.Random; the built-in hash() would differ between processes.
    return random.Random("\x1f".join(map(str, parts)))


def stable_fraction(text: str) -> float:
    """Hash `text` to a number in [0, 1), uniformly; the same text always gives the same number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48

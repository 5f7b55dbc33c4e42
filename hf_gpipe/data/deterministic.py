"""Randomness, hashes and splits that are the same in every process, on every machine, whatever PYTHONHASHSEED is."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

SPLITS = ("train", "validation", "test")


def stable_random(*parts: object) -> random.Random:
    """A random generator that is seeded by `parts` (strings and integers), such as ("cldr", seed, language)."""
    # A string seed goes through SHA-512 inside random.Random; the built-in hash() would differ between processes.
    return random.Random("\x1f".join(map(str, parts)))


def stable_fraction(text: str) -> float:
    """Hash `text` to a number in [0, 1), uniformly; the same text always gives the same number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


@lru_cache(2**16)  # of a corpus of many languages, English keys recur
def split_of(key: str, validation_fraction: float, test_fraction: float) -> str:
    """The split of items with this key, by a hash of the key alone."""
    position = stable_fraction(key)
    if position < test_fraction:
        return "test"
    return "validation" if position < validation_fraction + test_fraction else "train"

"""Stands for the package `nltk`, of which an example script splits texts into sentences."""

from __future__ import annotations

from types import SimpleNamespace

data = SimpleNamespace(find=lambda name: name)


def sent_tokenize(text: str) -> list[str]:
    return text.split(". ")

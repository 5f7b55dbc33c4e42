"""Candidates that a shell offers for the word of a command line that is being typed.

    complete -o nospace -o default -C "hf-gpipe --complete" hf-gpipe

The shell calls the program with the line in COMP_LINE and the place of the cursor in COMP_POINT, and reads a line for
each candidate. Where there is none, it offers files if it was told to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from importlib import import_module

_RECIPE = (".yaml", ".yml")


def complete(commands: Iterable[str]) -> list[str]:
    """The candidates for the word before the cursor, each with the space that follows it, if any."""
    line = os.environ.get("COMP_LINE", "")
    *before, word = re.split(r"\s+", line[: int(os.environ.get("COMP_POINT") or len(line))].lstrip())
    if len(before) < 2:
        names = [*commands, "--help", "--version"] if before else []
        return [f"{name} " for name in names if name.startswith(word)]
    command, words = before[1], before[2:]
    if command not in commands or "=" in word:
        return []
    if word.startswith("-"):
        return [f"{option} " for option in _options(command) if option.startswith(word)]
    if words[-1:] == ["--help"] and command == "train":
        from hf_gpipe.recipe.fields import SECTIONS

        return [f"{section} " for section in SECTIONS if section.startswith(word)]
    # Before there is a recipe, a word may be the beginning of its file.
    return _keys(word) if any(one.endswith(_RECIPE) for one in words) else []


def _options(command: str) -> Sequence[str]:
    """The options of a command, from its usage."""
    module = import_module(f"hf_gpipe.commands.{command}")
    usage = module.USAGE if command == "train" else module._parser().format_usage()
    return sorted({"--help", *re.findall(r"(?<![\w-])--[a-z][\w-]*", usage.partition("\n\n")[0])})


def _keys(word: str) -> list[str]:
    """The keys of recipes that begin with a word, with the "=" that follows; their sections, before there is a dot."""
    from hf_gpipe.recipe.fields import SECTIONS
    from hf_gpipe.settings.section import keys_of

    if "." not in word:
        return [f"{section}." for section in SECTIONS if section.startswith(word)]
    section, _, start = word.partition(".")
    keys = keys_of(SECTIONS[section]) if section in SECTIONS else {}
    return [f"{section}.{name}=" for name in keys if name.startswith(start)]

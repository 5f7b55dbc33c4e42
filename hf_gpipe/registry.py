"""Modes by name: the packages above find the parts of a mode here, and import none."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

#: The modes, a folder of `hf_gpipe.modes` each, in the order in which they change a table.
MODES = ("host_graphs", "asynchronous", "visits", "divided_head", "teacher")


@cache
def parts_of_modes(part: str) -> dict[str, ModuleType]:
    """The module of this name of each mode that has one, such as "table" (`hf_gpipe.modes` lists them)."""
    names = {mode: f"hf_gpipe.modes.{mode}.{part}" for mode in MODES}
    return {mode: import_module(name) for mode, name in names.items() if find_spec(name) is not None}

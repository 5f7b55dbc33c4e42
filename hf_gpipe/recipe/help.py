"""The help texts of recipes: a page of the main keys, or every key of a section."""

from __future__ import annotations

import inspect
import json
import re
import textwrap

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.recipe.data import DataSection
from hf_gpipe.recipe.fields import SECTIONS, all_keys
from hf_gpipe.recipe.strict_yaml import write
from hf_gpipe.settings.section import Key, keys_of
from hf_gpipe.settings.words import describe

_WIDTH = 100
_INDENT = " " * 6

MAIN_KEYS = (
    *("model.path", "model.config", "model.dtype", "model.quantization", "lora.r", "data.kind", "data.path"),
    *("data.max_length", "data.max_source_tokens", "data.max_target_tokens", "tokenizer.path"),
    *("pipeline.num_stages", "pipeline.replicas", "pipeline.num_micro_batches", "pipeline.schedule"),
    *("pipeline.recompute", "pipeline.partition", "training.output_dir", "training.max_steps"),
    *("training.num_train_epochs", "training.batch_size", "training.learning_rate", "training.save_steps"),
)
"""The keys that most recipes set."""


def recipe_help() -> str:
    """The sections, one line each, and the main keys with their defaults."""
    width = max(map(len, SECTIONS))
    sections = [f"  {name:{width}}  {_title(cls)}" for name, cls in SECTIONS.items()]
    named = {f"{section}.{key.name}": key for section, key in all_keys()}
    width = max(map(len, MAIN_KEYS))
    keys = [f"  {name:{width}}  {_shortened(named[name], 115 - width)}" for name in MAIN_KEYS]
    return "\n".join(["sections of a recipe:", *sections, "", "the keys that most recipes set:", *keys])


def section_help(name: str) -> str:
    """Every key of a section with what it allows, its default, its text and the kinds of data that use it.

    Raises:
        UserError: the section does not exist.
    """
    if name not in SECTIONS:
        raise UserError(f"{name!r} is not a section of a recipe{nearest(name, SECTIONS)}; {', '.join(SECTIONS)} are")
    lines = [f"{name}: {inspect.cleandoc(SECTIONS[name].__doc__ or '')}"]
    for key in keys_of(SECTIONS[name]).values():
        lines.append(_wrap(f"{name}.{key.name}: {describe(key.schema)}; {default_text(key)}{kinds_text(key)}", "  "))
        lines.append(_wrap(key.text, _INDENT))
    return "\n".join(lines)


def _title(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def _shortened(key: Key, width: int) -> str:
    """The default of a key and the beginning of its text."""
    first = re.split(r"; |\. ", key.text)[0].rstrip(".")
    return textwrap.shorten(f"({default_text(key).removeprefix('default: ')}) {first}", width, placeholder=" ...")


def default_text(key: Key) -> str:
    """The default of a key as YAML in one line, or that it is required."""
    if isinstance(key.default, str) and "\n" in key.default:
        return f"default: {json.dumps(key.default)}"
    return "required" if key.is_required else write({"default": key.default}).strip()


def kinds_text(key: Key) -> str:
    """The kinds of data that use a key; empty: all."""
    if key.kinds is None:
        return ""
    others = [kind for kind in keys_of(DataSection)["kind"].schema["enum"] if kind not in key.kinds]
    few = f"all but {', '.join(others)}" if len(others) < len(key.kinds) else ", ".join(key.kinds)
    return f"; data.kind: {few}"


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)

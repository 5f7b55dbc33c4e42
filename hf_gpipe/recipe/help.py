"""The help text of every key, taken from the string under its field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

from hf_gpipe.recipe.extends import EXTENDS_HELP
from hf_gpipe.recipe.fields import Recipe
from hf_gpipe.recipe.strict_yaml import write
from hf_gpipe.recipe.typed import describe

_WIDTH = 100
_INDENT = " " * 6


def recipe_help() -> str:
    """Every key with what it allows, its default and its text, section by section."""
    sections = [_section(name, hint) for name, hint in get_type_hints(Recipe).items() if is_dataclass(hint)]
    return "\n\n".join([EXTENDS_HELP, *sections])


def field_texts(cls: type) -> dict[str, str]:
    """The string literal under each field of a dataclass, by the field's name."""
    (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(class_node, ast.ClassDef)
    texts = {}
    for statement, following in zip(class_node.body, class_node.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def _section(name: str, cls: Any) -> str:
    texts = field_texts(cls)
    hints = get_type_hints(cls, include_extras=True)
    lines = [f"{name}: {inspect.getdoc(cls)}"]
    for field in fields(cls):
        lines.append(_wrap(f"{name}.{field.name}: {describe(hints[field.name])}; {_default(field)}", "  "))
        lines.append(_wrap(texts[field.name], _INDENT))
    return "\n".join(lines)


def _default(field: Field[Any]) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return write({"default": value}).strip()


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)

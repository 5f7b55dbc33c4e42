"""Which of the recipes stands for which of the paper's models."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.errors import UserError, nearest
from translation_scaling.claims import Roles


def roles_of(models: Sequence[str], baseline: str | None = None, pair: Sequence[str] | None = None) -> Roles:
    """The roles that options give, and for the others the recipes whose names end in base, deep and wide.

    Args:
        models: names of the recipes.
        baseline: one of them, or the last word of its name ("base" of "laptop-base").
        pair: the same for the deep and the wide one.

    Raises:
        UserError: a name that is none of them or stands for several, or one recipe with two roles.
    """
    deep, wide = pair if pair is not None else (None, None)
    found = Roles(
        _find("--baseline", baseline, "base", models),
        _find("--pair", deep, "deep", models),
        _find("--pair", wide, "wide", models),
    )
    names = [name for name in (found.base, found.deep, found.wide) if name is not None]
    if len(set(names)) < len(names):
        raise UserError(
            f"one recipe cannot be two of baseline ({found.base}), deep ({found.deep}) and wide ({found.wide})"
        )
    return found


def _find(option: str, asked: str | None, role: str, models: Sequence[str]) -> str | None:
    """The recipe that is asked for; where none is, the one with the role's name, if there is one alone."""
    word = role if asked is None else asked
    if word in models:
        return word
    matching = [name for name in models if name.replace("_", "-").split("-")[-1] == word]
    if len(matching) == 1:
        return matching[0]
    if asked is None:
        return None
    which = f"stands for {', '.join(matching)}" if matching else f"is no recipe{nearest(asked, models)}"
    raise UserError(f"{option} {asked}: this name {which}; the recipes are {', '.join(models)}")

"""Modes and tasks by name: the packages above them find their parts here, and import none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from hf_gpipe.errors import UserError

#: The modes, a folder of `hf_gpipe.modes` each, in the order in which they change a table.
MODES = ("chunks", "host_graphs", "asynchronous", "visits", "divided_head", "teacher", "tensor_parallel")


class Kind(NamedTuple):
    """A kind of data.

    Attributes:
        task: the module of its task in `hf_gpipe.tasks`.
        traits: what its rows and its loss are like, by which keys are for it (`hf_gpipe.settings.kinds`).
    """

    task: str
    traits: tuple[str, ...] = ()


#: The kinds of data by name. Any other kind is the name of the module of a task of one's own.
KINDS = {
    "cldr": Kind("translation.task", ("pairs",)),
    **dict.fromkeys(("jsonl", "csv", "parquet"), Kind("translation.task", ("pairs", "read", "fields"))),
    "parallel": Kind("translation.task", ("pairs", "read")),
    "hub": Kind("translation.task", ("pairs", "read", "fields")),
    "text": Kind("text", ("sequence",)),
    "chat": Kind("sft", ("sequence", "messages")),
    "preferences": Kind("dpo", ("sequence", "messages", "two rows", "several rows")),
    "kto": Kind("kto", ("sequence", "messages", "several rows")),
    "rewards": Kind("reward", ("sequence", "messages", "two rows", "several rows")),
    "prompts": Kind("grpo.task", ("sequence", "messages", "several rows")),
    "classification": Kind("classify", ("sequence", "labels")),
    "embeddings": Kind("embeddings", ("sequence", "several rows")),
    "image_text": Kind("image_text", ("sequence",)),
    "images": Kind("images", ("labels",)),
}


@cache
def parts_of_modes(part: str) -> dict[str, ModuleType]:
    """The module of this name of each mode that has one, such as "table" (`hf_gpipe.modes` lists them)."""
    names = {mode: f"hf_gpipe.modes.{mode}.{part}" for mode in MODES}
    return {mode: import_module(name) for mode, name in names.items() if find_spec(name) is not None}


@cache
def functions_of_modes(part: str, name: str) -> tuple[Callable[..., Any], ...]:
    """The functions of this name in `parts_of_modes(part)`, of the modes that have one."""
    return tuple(getattr(module, name) for module in parts_of_modes(part).values() if hasattr(module, name))


def task_module(name: str) -> Any:
    """The module of a task, by its name in `hf_gpipe.tasks` or by its kind of data."""
    return import_module(f"hf_gpipe.tasks.{KINDS[name].task if name in KINDS else name}")


def task_of_kind(kind: str) -> Any:
    """The task of a kind of data (`hf_gpipe.from_recipe.tasks`). Raises UserError where its module has none."""
    module = task_module(kind)
    if not hasattr(module, "TASK"):
        raise UserError(
            f"data.kind is {kind}, and the module {module.__name__} has no TASK; name a task, or give it one"
        )
    return module.TASK


def has_own_task(kind: Any) -> bool:
    """Whether a kind of data is the name of a module of `hf_gpipe.tasks`, and no task of another kind."""
    others = {*KINDS, *(known.task.partition(".")[0] for known in KINDS.values())}
    is_name = isinstance(kind, str) and kind.isidentifier() and kind not in others
    return is_name and find_spec(f"hf_gpipe.tasks.{kind}") is not None

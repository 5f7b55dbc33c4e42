"""A `UserError` is a ValueError, and no handler of ValueError around code of the package changes one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_gpipe
from hf_gpipe import errors, strict_json
from hf_gpipe.checkpoint import lock
from hf_gpipe.checkpoint.lock import owned
from hf_gpipe.errors import CheckpointError, DataError, UserError
from hf_gpipe.recipe import DataSection
from hf_gpipe.training.arguments import PipelineTrainingArguments
from tests.checkpoint.test_lock import ALONE

OF_THE_USER = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, UserError)}


def test_scripts_that_expect_a_value_error_get_one(tmp_path: Path) -> None:
    """transformers and TRL raise ValueError for a wrong argument; ours went past the handlers of scripts."""
    with pytest.raises(ValueError, match="max_grad_norm='high': expected a number"):
        PipelineTrainingArguments(output_dir=str(tmp_path), max_grad_norm="high")
    assert all(issubclass(getattr(errors, name), ValueError) for name in OF_THE_USER)


def names_in(node: ast.AST | None) -> set[str]:
    return set() if node is None else {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def test_no_error_of_the_user_is_raised_into_a_handler_of_value_errors() -> None:
    """Such a handler put its own words around the message, or another in its place."""
    wrong = []
    for path in Path(hf_gpipe.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Try):
                continue
            caught = (names_in(handler.type) for handler in node.handlers)
            first = next((names for names in caught if names & {"ValueError", *OF_THE_USER}), set())
            parts = [part for statement in node.body for part in ast.walk(statement)]
            raised = [names_in(part.exc) for part in parts if isinstance(part, ast.Raise)]
            if "ValueError" in first and any(names & {*OF_THE_USER, "error", "self"} for names in raised):
                wrong.append(f"{path}:{node.lineno}")
    assert not wrong


def taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> int:
        raise UserError("it is another run's")

    monkeypatch.setattr(lock, "_free", refuse)
    with owned(folder, ALONE):
        pass


@pytest.mark.parametrize(
    ("cls", "message", "raising"),
    [
        (UserError, "it is another run's", taken),
        (DataError, "path is missing and kind is jsonl; ", lambda folder, _: DataSection(kind="jsonl")),
        (CheckpointError, r"\. cannot be read: it is not a regular file", lambda folder, _: strict_json.read(Path())),
    ],
)
def test_the_message_is_told_once(
    cls: type[UserError],
    message: str,
    raising: Callable[[Path, pytest.MonkeyPatch], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler of ValueError in the package would take the error for one of a library."""
    with pytest.raises(UserError, match=f"^{message}") as caught:
        raising(tmp_path, monkeypatch)
    assert type(caught.value) is cls

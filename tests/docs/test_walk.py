"""The walk of a mini-batch in docs/architecture.md is the one that a stack trace shows."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_gpipe
from hf_gpipe.runtime import head
from tests.training.toy import trainer

PACKAGE = Path(hf_gpipe.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def walk_of_the_page() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").split("## The walk of a mini-batch")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)


def files_of_the_package() -> list[str]:
    """Those on the stack, from the outermost to the innermost; a file that calls itself counts once."""
    paths = [Path(frame.filename) for frame in traceback.extract_stack()]
    names = [path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)]
    return [name for name, _ in groupby(names)]


def noting(function: Callable[..., Any], stacks: list[list[str]]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        stacks.append(files_of_the_package())
        return function(*args, **kwargs)

    return noted


def test_the_walk_of_a_mini_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[list[str]] = []
    losses: list[list[str]] = []
    monkeypatch.setattr(head, "slice_positions", noting(head.slice_positions, losses))
    made = trainer(tmp_path, family="llama", max_steps=1)
    block = next(module for module in made.pipe.models[0].model.modules() if isinstance(module, LlamaDecoderLayer))
    block.register_forward_pre_hook(noting(lambda *_: None, blocks))
    made.train()
    walk = walk_of_the_page()
    assert len(walk) == 11
    first = walk[0]
    assert blocks[0][blocks[0].index(first) :] == walk[:-1]
    assert losses[0][losses[0].index(first) :] == [*walk[:6], walk[-1]]

"""Rewards of completions that a column `answer` of the rows checks, by the name that a recipe gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_gpipe.data.chats import text_of_message

REWARDS: dict[str, Callable[[str, str], float]] = {
    "exact": lambda text, answer: float(text.strip() == answer.strip()),
    "contains": lambda text, answer: float(answer.strip() in text),
    "characters": lambda text, answer: (
        sum(own == right for own, right in zip(text, answer, strict=False)) / max(len(text), len(answer))
    ),
}
"""(completion, answer) -> its reward, from 0 to 1. "exact": whether they are the same but for white space around them;
"contains": whether the answer is in the completion; "characters": the share of characters that are the same at the same
place, of the longer one."""


def checked_by(name: str) -> Callable[..., list[float]]:
    """The reward function of a trainer for one of `REWARDS`."""

    def reward(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
        texts = [text_of_message(text if isinstance(text, str) else text[-1]) for text in completions]
        return [REWARDS[name](text, right) for text, right in zip(texts, answer, strict=True)]

    return reward

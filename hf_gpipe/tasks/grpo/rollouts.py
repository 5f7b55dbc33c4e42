"""Completions of prompts, wherever they come from."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hf_gpipe import strict_json
from hf_gpipe.errors import UserError
from hf_gpipe.tasks.grpo.rewards import GIVEN

RolloutFunction = Callable[[list[Any], Any], Mapping[str, Any]]
"""(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", and columns for reward functions}."""


class Rollouts(NamedTuple):
    """Completions, those of one prompt next to each other.

    Attributes:
        completions: the tokens of each.
        log_probs: of each token, when it was sampled; None: not known.
        columns: more columns for reward functions.
    """

    completions: list[list[int]]
    log_probs: list[list[float]] | None = None
    columns: dict[str, Any] | None = None

    def problem(self, max_tokens: int, vocabulary: int) -> str:
        """Why these can be no completions of at most so many tokens of so many; empty if they can."""
        for number, tokens in enumerate(self.completions):
            if not 1 <= len(tokens) <= max_tokens or not all(0 <= token < vocabulary for token in tokens):
                return (
                    f"completion {number} has {len(tokens)} tokens, {reprlib.repr(tokens)}; expected 1 to "
                    f"{max_tokens}, with the one that ends it, each below {vocabulary}"
                )
        for number, (tokens, log_probs) in enumerate(zip(self.completions, self.log_probs or (), strict=False)):
            if len(log_probs) != len(tokens) or not all(map(math.isfinite, log_probs)):
                return (
                    f"completion {number} has {len(tokens)} tokens and the log-probabilities {reprlib.repr(log_probs)}"
                    "; expected a finite one of each token"
                )
        return ""

    def until(self, end: int | None) -> Rollouts:
        """The same, each up to its first `end`, with it."""
        cuts = [completion.index(end) + 1 if end in completion else len(completion) for completion in self.completions]
        completions = [completion[:cut] for completion, cut in zip(self.completions, cuts, strict=True)]
        log_probs = self.log_probs
        if log_probs is not None:
            log_probs = [own[:cut] for own, cut in zip(log_probs, cuts, strict=True)]
        return Rollouts(completions, log_probs, self.columns)

    def at_positions(self, shape: Sequence[int], prompt_lengths: Sequence[int]) -> torch.Tensor:
        """The log-probabilities (N, T) at the position before each token, 0 elsewhere, in float64."""
        values = torch.zeros(tuple(shape), dtype=torch.float64)
        for row, length, own in zip(values, prompt_lengths, self.log_probs or (), strict=True):
            row[length - 1 : length - 1 + len(own)] = torch.tensor([*map(float, own)], dtype=torch.float64)
        return values


def rollouts_of(
    function: RolloutFunction,
    prompts: list[Any],
    trainer: Any,
    prompt_ids: list[list[int]],
    max_tokens: int,
    vocabulary: int,
) -> Rollouts:
    """The rollouts that a function makes of prompts, each of which stands there as often as it has completions.

    Args:
        function: of the user.
        prompts: texts or messages.
        trainer: the second argument of the function.
        prompt_ids: the tokens of each, which those of the function must be.
        max_tokens: the most tokens of a completion.
        vocabulary: the number of tokens that the model knows.

    Raises:
        UserError: the function fails, or gives something else.
    """
    try:
        given = function(prompts, trainer)
    except Exception as error:
        raise UserError(f"rollout_func failed: {type(error).__name__}: {error}") from error
    names = ("prompt_ids", "completion_ids", "logprobs")
    if not isinstance(given, Mapping) or set(names) - given.keys():
        keys = [*given] if isinstance(given, Mapping) else reprlib.repr(given)
        raise UserError(f"rollout_func gave {keys}; expected a dict with {', '.join(names)}")
    made = {name: given[name] for name in names}
    shape = dict[str, list[list[int]]]
    strict_json.fit({name: made[name] for name in names[:2]}, shape, "rollout_func's dict", error=UserError)
    if made["logprobs"] is not None:
        strict_json.fit(made["logprobs"], list[list[float]], "rollout_func's logprobs", error=UserError)
    completions, log_probs = made["completion_ids"], made["logprobs"]
    if made["prompt_ids"] != prompt_ids:
        raise UserError(
            f"rollout_func gave other prompt_ids, {reprlib.repr(made['prompt_ids'])}, than those of the dataset's "
            f"prompts, {reprlib.repr(prompt_ids)}; tokenise them as PromptExamples does"
        )
    if len(completions) != len(prompts) or (log_probs is not None and len(log_probs) != len(prompts)):
        raise UserError(
            f"rollout_func gave {len(completions)} completions for {len(prompts)} prompts, or logprobs of other "
            "numbers; expected one of each for each prompt"
        )
    columns = {name: value for name, value in given.items() if name not in names}
    for name in columns:
        if name == "env_mask":
            raise UserError("rollout_func gave 'env_mask': every token must be the model's own; leave it out")
        if not isinstance(name, str) or name in GIVEN:
            raise UserError(f"rollout_func gave {name!r}, which reward functions get from the trainer; rename it")
    rollouts = Rollouts(completions, log_probs, columns)
    if problem := rollouts.problem(max_tokens, vocabulary):
        raise UserError(f"rollout_func: {problem}")
    return rollouts

"""The rewards of completions: by functions, and by models that classify rows."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import UserError
from hf_gpipe.sources import is_here

RewardFunction = Callable[..., Sequence[float | None]]
"""(prompts=, completions=, completion_ids=, trainer_state=, and each other column of the rows) -> the reward of each
completion; None: it has none, and NaN is an error."""

#: What reward functions get beside the columns.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")


class Rewards:
    """Several sources of rewards, each a `RewardFunction`, or a model that classifies rows, in memory or by its path.

    A model reads each prompt with its completion, and its first logit is the reward, as in TRL. It is whole on one
    device, that of the process that asks.

    Args:
        given: one source or several.
        tokenizers: of each source that is a model, one for all or a list; None: the model's own.

    Raises:
        UserError: there is no source, or something else.
    """

    def __init__(self, given: Any, tokenizers: Any = None) -> None:
        self._sources: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        for source in self._sources:
            if not (isinstance(source, str | nn.Module) or callable(source)):
                raise UserError(
                    f"reward_funcs has {reprlib.repr(source)}, a {type(source).__name__}; give functions, or models "
                    "that classify rows, or their paths"
                )
        if not self._sources:
            raise UserError("reward_funcs is empty; give at least one function")
        self._tokenizers: list[Any] = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
        if tokenizers is None:
            self._tokenizers *= len(self._sources)
        if len(self._tokenizers) != len(self._sources):
            raise UserError(
                f"reward_processing_classes has {len(self._tokenizers)} entries for {len(self._sources)} reward_funcs; "
                "give one for each, None for functions"
            )

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def names(self) -> list[str]:
        """The name of each source, in metrics."""
        return [_name_of(source) for source in self._sources]

    def load(self, device: torch.device) -> None:
        """Read the models and put them on a device. Raises UserError where one cannot be a reward."""
        for number, (source, tokenizer) in enumerate(zip(self._sources, self._tokenizers, strict=True)):
            if isinstance(source, str | nn.Module):
                self._sources[number] = _RewardModel(source, tokenizer, device)

    def __call__(self, columns: Mapping[str, Any]) -> torch.Tensor:
        """The rewards of N completions by F sources, (N, F), NaN for None.

        Raises UserError where a source fails, or gives others.
        """
        return torch.stack([_values_of(source, columns) for source in self._sources], dim=1)


class _RewardModel:
    """A model that classifies rows as a reward function."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> None:
        self.__name__ = _name_of(model)
        if isinstance(model, str):
            try:
                is_here(model)
                path, options = model, {"num_labels": 1, "output_loading_info": True}
                model, report = AutoModelForSequenceClassification.from_pretrained(path, **options)
            except (OSError, ValueError, RuntimeError) as error:
                raise UserError(f"reward_funcs: {model!r} cannot be read as a model of rewards: {error}") from error
            if missing := sorted(report["missing_keys"]):
                raise UserError(
                    f"reward_funcs: {path!r} has no weights of {missing[0]}, so its rewards would be random; give a "
                    "model that was trained to give rewards"
                )
        labels = getattr(getattr(model, "config", None), "num_labels", None)
        if labels != 1 or "SequenceClassification" not in type(model).__name__:
            raise UserError(
                f"reward_funcs: {type(model).__name__} has {labels} labels and is no reward; give a model of "
                "AutoModelForSequenceClassification with num_labels=1"
            )
        if tokenizer is None:
            if not (path := model.config.name_or_path):
                raise UserError(f"reward_processing_classes: give the tokenizer of {self.__name__}")
            tokenizer = read_tokenizer(path)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The reward stands at the last token that is not padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._model, self._tokenizer, self._device = model.to(device).eval(), tokenizer, device

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        texts = [
            row if isinstance(row, str) else self._tokenizer.apply_chat_template(row, tokenize=False) for row in rows
        ]
        options = {"padding": True, "padding_side": "right", "add_special_tokens": False}
        inputs = self._tokenizer(text=texts, return_tensors="pt", **options).to(self._device)
        rewards: list[float] = self._model(**inputs).logits[:, 0].float().tolist()
        return rewards


def _name_of(source: Any) -> str:
    if isinstance(source, str):
        return source.rstrip("/").split("/")[-1]
    if isinstance(source, nn.Module):
        path = str(getattr(getattr(source, "config", None), "name_or_path", "") or type(source).__name__)
        return path.rstrip("/").split("/")[-1]
    return getattr(source, "__name__", None) or type(source).__name__


def _values_of(function: RewardFunction, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The rewards that a function gives (N,), NaN for None. Raises UserError where it gives others, or fails."""
    name, count = _name_of(function), len(arguments["completions"])
    try:
        returned = function(**arguments)
    except Exception as error:
        raise UserError(f"the reward function {name} failed: {type(error).__name__}: {error}") from error
    expected = f"expected {count} finite numbers or None, one for each completion"
    try:
        given = [*returned]
        values = torch.tensor([math.nan if value is None else _number(value) for value in given])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"the reward function {name} gave {reprlib.repr(returned)}, a {type(returned).__name__}; {expected}"
        ) from None
    if len(values) != count:
        raise UserError(f"the reward function {name} gave {len(values)} rewards; {expected}")
    is_none = torch.tensor([value is None for value in given])
    if wrong := (~values.isfinite() & ~is_none).nonzero().flatten().tolist():
        raise UserError(f"the reward function {name} gave {given[wrong[0]]!r} for completion {wrong[0]}; {expected}")
    return values


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError  # float() would read digits
    return float(value)

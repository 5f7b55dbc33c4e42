"""The rewards of completions: by functions, and by models that classify rows."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import UserError
from hf_gpipe.sources import is_here

logger = transformers.logging.get_logger(__name__)

Values = Sequence[float | None]
RewardFunction = Callable[..., Values | Awaitable[Values]]
"""(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, and each other column of the rows)
-> the reward of each completion; None: it has none, and NaN is an error. An async function awaits it beside others."""

#: What reward functions get beside the columns.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class Rewards:
    """Several sources of rewards, each a `RewardFunction`, or a model that classifies rows, in memory or by its path.

    A model reads each prompt with its completion, and its first logit is the reward, as in TRL. It is whole on one
    device, that of the process that asks.

    Args:
        given: one source or several.
        tokenizers: of each source that is a model, one for all or a list; None: the model's own.
        chat_template_kwargs: variables for the templates of these tokenizers.

    Raises:
        UserError: there is no source, or something else.
    """

    def __init__(
        self, given: Any, tokenizers: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if given is None:
            raise UserError("No reward source provided: reward_funcs is None; give at least one function")
        self._sources: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        self._variables = dict(chat_template_kwargs or {})
        #: Where async functions run: a loop of their own, which a notebook's does not disturb.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._has_warned = False
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
                f"reward_processing_classes has {len(self._tokenizers)} entries for {len(self._sources)} reward_funcs, "
                "and the numbers must match; give one for each, None for functions"
            )

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def names(self) -> list[str]:
        """The name of each source, in metrics."""
        return [_name_of(source) for source in self._sources]

    @property
    def tokenizers(self) -> list[Any]:
        """The tokenizer of each source, None of functions."""
        own = [source.tokenizer if isinstance(source, _RewardModel) else None for source in self._sources]
        return [given or found for given, found in zip(self._tokenizers, own, strict=True)]

    def load(self, device: torch.device) -> None:
        """Read the models and put them on a device. Raises UserError where one cannot be a reward."""
        for number, (source, tokenizer) in enumerate(zip(self._sources, self._tokenizers, strict=True)):
            if isinstance(source, str | nn.Module):
                self._sources[number] = _RewardModel(source, tokenizer, device, self._variables)

    def __call__(self, columns: Mapping[str, Any]) -> torch.Tensor:
        """The rewards of N completions by F sources, (N, F), NaN for None. Async functions run beside each other.

        Raises UserError where a source fails, or gives others.
        """
        returned: list[Any] = []
        for source in self._sources:
            with _naming(source):
                returned.append(source(**columns))
        if waiting := {number: value for number, value in enumerate(returned) if inspect.isawaitable(value)}:
            for number, value in zip(waiting, self._awaited(waiting), strict=True):
                returned[number] = value
        values = torch.stack([_values_of(*own, columns) for own in zip(self._sources, returned, strict=True)], dim=1)
        if not self._has_warned and bool((lacks := values.isnan().all(dim=1)).any()):
            self._has_warned = True
            row = int(lacks.nonzero()[0])
            given = {name: value[row] for name, value in columns.items() if name not in GIVEN[2:]}
            logger.warning(
                f"All reward functions returned None for the following kwargs:\n{given}\nThe completion has no "
                "influence on the training; later ones are not named"
            )
        return values

    def _awaited(self, waiting: Mapping[int, Awaitable[Any]]) -> list[Any]:
        """The values of async functions, from a thread that keeps its loop, because their clients may belong to it."""

        async def one(number: int) -> Any:
            with _naming(self._sources[number]):
                return await waiting[number]

        async def every() -> list[Any]:
            return await asyncio.gather(*map(one, waiting))

        def run() -> list[Any]:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(every())

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "rewards")
        return self._thread.submit(run).result()


class _RewardModel:
    """A model that classifies rows as a reward function."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        variables: Mapping[str, Any],
    ) -> None:
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
        self._model, self.tokenizer, self._device = model.to(device).eval(), tokenizer, device
        self._variables = dict(variables)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        texts = [
            row if isinstance(row, str) else self.tokenizer.apply_chat_template(row, tokenize=False, **self._variables)
            for row in rows
        ]
        options = {"padding": True, "padding_side": "right", "add_special_tokens": False}
        inputs = self.tokenizer(text=texts, return_tensors="pt", **options).to(self._device)
        rewards: list[float] = self._model(**inputs).logits[:, 0].float().tolist()
        return rewards


def _name_of(source: Any) -> str:
    if isinstance(source, str):
        return source.rstrip("/").split("/")[-1]
    if isinstance(source, nn.Module):
        path = str(getattr(getattr(source, "config", None), "name_or_path", "") or type(source).__name__)
        return path.rstrip("/").split("/")[-1]
    return getattr(source, "__name__", None) or type(source).__name__


@contextmanager
def _naming(function: Any) -> Iterator[None]:
    """Context manager that raises UserError, which names the function, for an error in it."""
    try:
        yield
    except Exception as error:
        raise UserError(f"the reward function {_name_of(function)} failed: {type(error).__name__}: {error}") from error


def _values_of(function: Any, returned: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The rewards that a function has returned, (N,), NaN for None. Raises UserError where it gives others."""
    name, count = _name_of(function), len(arguments["completions"])
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

"""Prediction by generation, as `predict_with_generate` asks for."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.modules.dropout import default_generator, mix
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.generation import check_generates
from hf_gpipe.sources import is_here
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.loader import Batch

#: The neutral value of every setting of `generate`, so that the model's generation_config changes nothing.
_NEUTRAL: dict[str, Any] = {
    **{name: None for name in vars(GenerationConfig()) if name[0] != "_" and name != "use_cache"},
    **{"num_beams": 1, "num_return_sequences": 1},
}
_TARGET_SIDE = ("labels", "decoder_input_ids", "decoder_attention_mask")


class Generation:
    """Generates for the rows of a mini-batch, as transformers' Seq2SeqTrainer does. Every process has one.

    An encoder-decoder is given the sources. A decoder-only model is given each row up to its first target, padded on
    the left, and the added tokens are compared with the targets: the prompt's labels must be -100. Samples depend
    on the run's seed, the step and the number of the mini-batch.

    Args:
        pipe: the pipeline.
        options: keyword arguments of `generate`.
        pad_token_id: the token that fills shorter rows; None: the model's own, or -100 where it has none.
        start_argument: of an encoder-decoder whose targets have a token of their language: the argument of `generate`
            that takes it, for each row by itself: "forced_bos_token_id", the first token of its targets, or
            "decoder_start_token_id", the last one.
    """

    def __init__(
        self,
        pipe: Pipeline,
        options: Mapping[str, Any],
        pad_token_id: int | None,
        start_argument: str | None = None,
    ) -> None:
        check_generates(pipe.adapter)
        self._pipe = pipe
        self._options, self._start_argument = dict(options), start_argument
        self._num_batches = 0
        self._is_decoder_only = not pipe.adapter.config.is_encoder_decoder
        own = pipe.adapter.reference.generation_config.pad_token_id
        self.pad_token_id = pad_token_id if pad_token_id is not None else IGNORED_LABEL if own is None else own

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Generate token ids (B, T'), on every process. A decoder-only model's are without the prompts."""
        if not self._is_decoder_only:
            inputs = {name: tensor for name, tensor in batch.items() if name not in _TARGET_SIDE}
            return self._generated(inputs) if self._start_argument is None else self._by_start(inputs, batch["labels"])
        inputs = left_padded_prompts(batch, max(self.pad_token_id, 0))
        return self._generated(inputs)[:, token_ids(inputs).shape[1] :]

    def _by_start(self, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Generate for the rows of each first token together, because `generate` takes one for all rows."""
        assert self._start_argument is not None, "it is known"
        last = (labels != IGNORED_LABEL).sum(dim=1) - 1
        place = last if self._start_argument == "decoder_start_token_id" else torch.zeros_like(last)
        tokens = labels.gather(1, place[:, None]).flatten()
        made: list[torch.Tensor] = [torch.empty(0)] * len(tokens)
        for token in tokens.unique().tolist():
            rows = (tokens == token).nonzero().flatten()
            alike = {name: tensor[rows] for name, tensor in inputs.items()}
            for row, ids in zip(rows.tolist(), self._generated(alike, **{self._start_argument: token}), strict=True):
                made[row] = ids
        return pad_sequence(made, batch_first=True, padding_value=max(self.pad_token_id, 0))

    def _generated(self, inputs: Mapping[str, torch.Tensor], **start: int) -> torch.Tensor:
        seed = mix(self._pipe.seed, self._pipe.step, self._num_batches)
        self._num_batches += 1
        default_generator(self._pipe.world.device).manual_seed(seed)
        ids = self._pipe.generate(**inputs, **self._options, **start)
        if len(ids) != len(token_ids(inputs)):
            raise UserError(
                "num_return_sequences: an evaluation compares one generated row with each row of targets; set it to 1"
            )
        tokens: torch.Tensor = ids.cpu()
        return tokens


def completions_of(pipe: Pipeline, prompts: Batch, end: int | None, max_tokens: int, **options: Any) -> torch.Tensor:
    """Generate the tokens that a decoder-only model adds to each of some prompts, (N, T), on every process.

    Args:
        pipe: the pipeline of the model.
        prompts: `input_ids` and `attention_mask`, (N, S) each, padded on the left.
        end: the token that ends a completion, and fills the rows after it; None: there is none.
        max_tokens: the most tokens of a completion.
        options: other keyword arguments of `generate`; the model's own generation_config does not count.
    """
    options |= {"max_new_tokens": max_tokens, "eos_token_id": end, "pad_token_id": end or 0}
    inputs = text_entries(token_ids(prompts), prompts["attention_mask"])
    return pipe.generate(**_NEUTRAL | options | inputs)[:, token_ids(inputs).shape[1] :]


def left_padded_prompts(batch: Batch, pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of the tokens before the first target of each row, padded on the left.

    Args:
        batch: a mini-batch of a decoder-only model: input_ids, and perhaps labels and attention_mask, each (B, T).
            Without labels a whole row is a prompt.
        pad_token_id: the token that fills the columns that the mask leaves out.

    Raises:
        DataError: a row without a prompt, or with labels and without a target.
    """
    ids, labels = token_ids(batch), batch.get("labels")
    is_target = torch.zeros_like(ids, dtype=torch.bool) if labels is None else labels != IGNORED_LABEL
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    if mask.shape != ids.shape:
        shapes = tuple(mask.shape), tuple(ids.shape)
        raise DataError(
            f"predict_with_generate: attention_mask has the shape {shapes[0]} and token ids {shapes[1]}; give both one "
            "shape"
        )
    positions = torch.arange(ids.shape[1])
    first = torch.where(is_target, positions, ids.shape[1]).amin(dim=1)
    in_prompt = mask & (positions < first[:, None])
    lacks_targets = labels is not None and not bool(is_target.any(dim=1).all())
    if lacks_targets or not bool(in_prompt.any(dim=1).all()):
        raise DataError(
            "predict_with_generate: a row of a decoder-only model needs a prompt, whose labels are -100, and targets "
            "after it; a row lacks a prompt or targets"
        )
    prompts = [row[is_own].tolist() for row, is_own in zip(ids, in_prompt, strict=True)]
    return PairCollator(pad_token_id).of_ids_on_the_left(prompts)


def generation_options(args: PipelineTrainingArguments, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `generate`. The options of a call replace the training arguments'."""
    chosen = {name: value for name, value in options.items() if value is not None}
    if args.generation_max_length is not None and not {"max_length", "max_new_tokens"} & chosen.keys():
        chosen["max_length"] = args.generation_max_length
    if args.generation_num_beams is not None:
        chosen.setdefault("num_beams", args.generation_num_beams)
    return chosen


def generation_config_of(source: str | GenerationConfig) -> GenerationConfig:
    """The configuration itself, or that which a file, directory or Hub id has. Raises UserError where there is none."""
    if isinstance(source, GenerationConfig):
        return copy.deepcopy(source)
    if not isinstance(source, str | os.PathLike):
        raise UserError(f"generation_config={source!r}: expected a GenerationConfig, a file, a directory or a Hub id")
    path = Path(source)
    try:
        if path.is_file():
            return GenerationConfig.from_pretrained(str(path.parent), path.name)
        is_here(source)
        return GenerationConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"generation_config={source!r}: no configuration of generation can be read: {error}") from error

"""A teacher's most likely tokens for the rows of a dataset; hf_gpipe/data/examples/teacher_file.py keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.job.device_choice import world_for
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import Pipeline, PipelineRequest
from hf_gpipe.recipe import PipelineConfig
from hf_gpipe.training.predicting import predict


def teacher_alone(spec: ModelSpec) -> Pipeline:
    """A teacher in one process."""
    config = PipelineConfig.of(None, num_stages=1, num_micro_batches=1, schedule="gpipe", recompute="none")
    return Pipeline.of(PipelineRequest(spec, config), world_for(config))


def top_k_of(
    pipe: Pipeline, rows: Any, k: int, *, temperature: float, batch_size: int
) -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
    """Yield each row's ids, and each position's k most likely next tokens and their log-probabilities, (T, k) both.

    Args:
        pipe: the teacher, in one process.
        rows: a dataset of {"input_ids", "labels"}.
        k: tokens of a position.
        temperature: by which logits are divided.
        batch_size: rows at a time.
    """

    def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = torch.log_softmax(logits.float() / temperature, dim=-1).topk(k)
        return top.indices, top.values

    numbers = range(len(rows))
    parts = [numbers[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    batches = (PairCollator(0)([rows[number] for number in part]) for part in parts)
    for part, predicted in zip(parts, predict(pipe, batches, with_logits=True, preprocess=most_likely), strict=True):
        for number, tokens, log_probs in zip(part, *map(torch.from_numpy, predicted.logits), strict=True):
            ids = token_ids(rows[number])
            yield ids, tokens[: len(ids)], log_probs[: len(ids)]

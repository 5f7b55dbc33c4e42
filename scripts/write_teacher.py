"""Writes the most likely tokens of a teacher for the rows of a recipe, for distillation without the teacher beside.

python scripts/write_teacher.py RECIPE FILE --k 64 [key=value ...]

The recipe names the teacher (distillation.teacher, distillation.quantization), the rows and the temperature. The
teacher runs alone, in one process. A training with distillation.top_k_file=FILE then needs no teacher.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.teacher_file import write_top_k
from hf_gpipe.errors import RecipeError
from hf_gpipe.from_recipe.model import named_teacher
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import Pipeline, PipelineRequest
from hf_gpipe.recipe import load_recipe
from hf_gpipe.runtime.device_choice import world_for
from hf_gpipe.settings.pipeline import PipelineConfig
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("file")
    parser.add_argument("--k", type=int, default=64, help="tokens of a position")
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_intermixed_args(argv)
    recipe = load_recipe(options.recipe, options.overrides)
    spec, task = named_teacher(recipe), task_of(recipe)
    if spec is None:
        raise RecipeError("distillation.teacher is null; name the teacher")
    corpus = task.corpus(recipe)
    tokenizer = task.processor(recipe, corpus)
    pipe = teacher_alone(spec)
    splits = [split for split in (corpus.train, corpus.validation) if len(split)]
    rows = [
        row
        for split in splits
        for row in top_k_of(
            pipe,
            task.rows(recipe, split, tokenizer),
            options.k,
            temperature=recipe.distillation.temperature,
            batch_size=recipe.evaluation.batch_size,
        )
    ]
    vocabulary = pipe.adapter.reference.get_output_embeddings().weight.shape[0]
    write_top_k(options.file, rows, vocabulary=vocabulary, temperature=recipe.distillation.temperature)
    print(f"{options.file}: {options.k} tokens of each of {sum(len(ids) for ids, _, _ in rows)} positions")


if __name__ == "__main__":
    main()

"""The inputs of the planner from a recipe: the shape of its longest mini-batch, and what its steps do."""

from __future__ import annotations

from typing import Literal

from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.recipe import Recipe
from hf_gpipe.registry import task_of_kind
from hf_gpipe.settings.kinds import PAIRS


def longest_mini_batch(
    recipe: Recipe, *, is_encoder_decoder: bool, rows_of_example: int = 1, more_tokens: int = 0
) -> Workload:
    """The workload of a recipe's whole mini-batch, with the longest source and target in every row.

    All targets of a mini-batch of `batch_tokens` have the greatest length here. With shorter targets there are more
    rows, which need more only if their sources are long all the same, or if they are padded to a long row, as
    without `length_bucketing`.

    A decoder-only model reads source and target in one sequence, or a block of text, or a conversation.

    Args:
        recipe: the recipe, whose batch size, in rows or target tokens, and longest texts are read.
        is_encoder_decoder: whether the model has an encoder and a decoder.
        rows_of_example: rows that an example becomes.
        more_tokens: tokens that are generated behind a row.
    """
    data = recipe.data
    source, target = data.max_source_tokens, getattr(data, data.length_key)
    rows = recipe.training.size.rows_of(target)
    if not is_encoder_decoder:
        # Text comes in blocks of the longest target, and conversations are targets as a whole.
        source = target = target if data.kind not in PAIRS else source + target
    if recipe.training.packing:
        return Workload.packed(rows, (source, source), (target, target))
    # Blocks of text are all equally long.
    return Workload(rows * rows_of_example, source + more_tokens, target + more_tokens, data.kind != "text")


def plan_inputs(recipe: Recipe, mini_batch: Workload) -> PlanInputs:
    """The inputs of a recipe, with the shape of its longest mini-batch."""
    saved: Literal["model", "adapters"] = "adapters" if recipe.lora.is_on else "model"
    training = recipe.training
    inputs = PlanInputs.from_training(training, example=mini_batch, packing=training.packing, saved=saved)
    planned: PlanInputs = task_of_kind(recipe.data.kind).planned(recipe, inputs)
    return planned

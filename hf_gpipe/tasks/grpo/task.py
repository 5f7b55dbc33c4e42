"""Prompts of a recipe: their completions are compared with the answers of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_gpipe.data.rows import Read
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.from_recipe.workload import longest_mini_batch
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.recipe import Recipe
from hf_gpipe.tasks.grpo.answers import checked_by
from hf_gpipe.tasks.grpo.prompts import PromptCollator, PromptExamples, prompted_of
from hf_gpipe.tasks.grpo.trainer import PipelineGRPOTrainer
from hf_gpipe.training.generating import completions_of
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.predicting import shared_batches


class _Prompts(Task):
    items, evaluating, trainer = "prompts", "completing the prompts", PipelineGRPOTrainer

    def reader(self, recipe: Recipe) -> Read:
        return prompted_of

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> PromptExamples:
        return PromptExamples([prompt.row for prompt in split], processor, max_length=recipe.data.max_length)

    def given(self, recipe: Recipe) -> Mapping[str, Any]:
        return {"reward_funcs": checked_by(recipe.grpo.reward)}

    def workload(self, recipe: Recipe, config: PreTrainedConfig) -> Workload:
        options = recipe.grpo
        several = {"rows_of_example": options.num_generations, "more_tokens": options.max_completion_length}
        return longest_mini_batch(recipe, is_encoder_decoder=False, **several)

    def planned(self, recipe: Recipe, inputs: PlanInputs) -> PlanInputs:
        return inputs.for_rollouts(recipe.grpo.max_completion_length, recipe.grpo.num_iterations)

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        options = recipe.grpo
        return evaluate_completions(pipe, held_out, processor, options.reward, options.max_completion_length)


def evaluate_completions(
    pipe: Pipeline,
    held_out: HeldOut,
    tokenizer: PreTrainedTokenizerBase | None,
    reward: str,
    max_completion_length: int,
) -> HeldOutReport:
    """The mean of a checkable reward over the most likely completions of held-out prompts, and how many have 1."""
    world = pipe.world
    end = world.from_main(lambda: None if tokenizer is None else tokenizer.eos_token_id)
    number, batches = held_out.mini_batches(pipe, PromptCollator(end or 0))
    rewards: list[float] = []
    for batch in shared_batches(batches, world):
        tokens = completions_of(pipe, batch, end, max_completion_length, do_sample=False)

        def of_batch(batch: Batch = batch, completions: torch.Tensor = tokens) -> list[float]:
            assert tokenizer is not None, "the main process has the tokenizer"
            answers = [held_out.rows.rows[row]["answer"] for row in batch["row"].tolist()]
            return checked_by(reward)(tokenizer.batch_decode(completions, skip_special_tokens=True), answers)

        rewards += world.from_main(of_batch)
    mean, share = sum(rewards) / number, sum(value == 1 for value in rewards) / number
    values = {"num_prompts": number, "reward": mean, "share_right": share}
    return HeldOutReport("prompts", values, ("prompts", f"{number} prompts"))


TASK = _Prompts()

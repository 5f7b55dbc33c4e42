"""The text that the command prints before a training."""

from __future__ import annotations

from pathlib import Path

from hf_gpipe.job.facts import machines
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.text import count_text


def say(text: str) -> None:
    """Print at once, also where stdout is a file."""
    print(text, flush=True)


def start_text(recipe: Recipe, pipe: Pipeline, corpus: str, checkpoint: Path | None) -> str:
    """The model, its stages and the data; `corpus` says in words how much there is."""
    sizes = ", ".join(str(len(layers)) for layers in pipe.partition)
    processes = pipe.world.num_processes
    lines = [
        f"model      {pipe.adapter.config.model_type}, {count_text(pipe.adapter.num_parameters(), '.2f')} parameters, "
        f"{len(pipe.adapter.layers)} layers",
        f"pipeline   K = {pipe.num_stages} stages of {sizes} layers in {processes} process{'es' * (processes > 1)}, "
        f"M = {pipe.num_micro_batches} micro-batches, schedule {pipe.schedule_name}, recompute {pipe.recompute}",
        f"data       {corpus}; mini-batches of {recipe.training.size}",
        f"output     {recipe.training.output_dir}",
    ]
    lines += [f"machine    {line}" for line in machines(pipe.world.ranks)]
    lines += [f"link       {line}" for line in pipe.links]
    if checkpoint is not None:
        lines.append(f"resuming   from {checkpoint}")
    return "\n".join(lines)

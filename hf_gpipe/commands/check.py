"""python -m hf_gpipe check recipe.yaml | model: check on a tiny clone whether a model is exact in stages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_gpipe.commands.base import loading, run_command
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.recipe import load_recipe

USAGE = """\
usage: python -m hf_gpipe check recipe.yaml [key=value ...]
       python -m hf_gpipe check MODEL [--trust-remote-code]

Makes a tiny clone of a model's configuration, runs it in stages, and compares the loss and every gradient with the
plain transformers model. No weights are read. Exit code: 0 exact, 1 not exact, 2 an error that you can correct.

  recipe.yaml           a recipe; its number of stages is tried, and one stage per layer
  key=value             replaces a value of the recipe, for example pipeline.num_stages=4
  MODEL                 a Hub id or a directory with a config.json; 3 stages are tried, and one stage per layer
  --trust-remote-code   run the Python code that comes with the model
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or {"-h", "--help"} & set(args):
        print(USAGE)
        return 0 if args else 2
    return run_command(lambda: _check(args))


def _check(args: Sequence[str]) -> int:
    with loading():
        import torch
        import transformers

        from hf_gpipe.adapters.chain import image_classifier_of
        from hf_gpipe.adapters.quantised import find_quantisation
        from hf_gpipe.checkpoint.configuration import read_config
        from hf_gpipe.model.exactness import CloneError, compare

    num_stages = 3
    if args[0].endswith((".yaml", ".yml")):
        from hf_gpipe.training.recipe_model import model_config

        recipe = load_recipe(args[0], args[1:])
        config, trust_remote_code = model_config(recipe, None), recipe.model.trust_remote_code
        if isinstance(recipe.pipeline.num_stages, int):
            num_stages = recipe.pipeline.num_stages
    else:
        trust_remote_code = "--trust-remote-code" in args
        if unknown := [arg for arg in args[1:] if arg != "--trust-remote-code"]:
            raise UserError(f"{unknown[0]!r} is not understood; key=value goes with a recipe, a file named *.yaml")
        source = str(Path(args[0]).parent) if Path(args[0]).name == "config.json" else args[0]
        config = read_config(source, trust_remote_code=trust_remote_code)
    if image_classifier_of(config) is not None:
        raise UserError(
            f"check compares models that read text; {config.architectures[0]} is a chain of layers, whose "
            "every tensor is followed when a pipeline is made: docs/image_models.md lists the families"
        )
    print(f"model      {config.model_type}, transformers {transformers.__version__}")
    try:
        find_quantisation(config, None, torch.float32)
        comparison = compare(config, (num_stages, None), trust_remote_code=trust_remote_code)
    except CloneError:
        raise
    except UnsupportedModelError as error:
        print(f"verdict    not exact: {error}")
        return 1
    dtype = str(comparison.dtype).removeprefix("torch.")
    print(f"clone      {comparison.model_class} with small sizes and random weights, in {dtype}")
    print(f"compared   loss and {comparison.num_gradients} gradients; padded rows, 2 micro-batches, recomputation")
    for count, difference in comparison.differences.items():
        print(f"{count:2} stages  largest difference {difference:.1e} of the plain model's gradient norm")
    print(f"verdict    {'exact' if comparison.is_exact else f'not exact: {comparison}'}")
    return 0 if comparison.is_exact else 1

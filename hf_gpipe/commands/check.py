"""hf-gpipe check recipe.yaml | model: check on a tiny clone whether a model is exact in stages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_gpipe.commands.base import Parser, loading, run_with_options
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.recipe import Recipe, load_recipe
from hf_gpipe.sources import is_here
from hf_gpipe.text import GREEN, RED, coloured

if TYPE_CHECKING:
    from hf_gpipe.adapters.text import TextAdapter

DESCRIPTION = """\
Makes a tiny clone of a model's configuration, runs it in stages, and compares the loss and every gradient with the
plain transformers model. No weights are read. The clone runs in the recipe's number of stages, or in 3 stages without a
recipe, and in one stage per layer. Exit code: 0 exact, 1 not exact, 2 an error that you can correct.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_with_options(argv, _parser(), _check)


def _parser() -> Parser:
    parser = Parser(DESCRIPTION, "check")
    parser.add_argument("model", help="a recipe.yaml, a Hub id, or a directory with a config.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code of the model")
    return parser


def _check(options: argparse.Namespace) -> int:
    if not options.model.endswith((".yaml", ".yml")):
        is_here(options.model)
    with loading():
        import transformers

        from hf_gpipe.adapters.auto_classes import IMAGE_CLASSIFICATION
        from hf_gpipe.checkpoint.configuration import read_config
        from hf_gpipe.model.opening import guarded_adapter
        from hf_gpipe.model.spec import ModelSpec
        from hf_gpipe.pipeline.exactness import CloneError, compare
        from hf_gpipe.schedule import SPLIT_SCHEDULES

    num_stages, recipe = 3, None
    if options.model.endswith((".yaml", ".yml")):
        from hf_gpipe.from_recipe.model import model_config

        trusting = ["model.trust_remote_code=true"] if options.trust_remote_code else []
        recipe = load_recipe(options.model, [*options.overrides, *trusting])
        config = model_config(recipe, None)
        if isinstance(recipe.pipeline.num_stages, int):
            num_stages = recipe.pipeline.num_stages
    else:
        if options.overrides:
            raise UserError(
                f"{options.overrides[0]!r} is not understood; key=value goes with a recipe, a file named *.yaml"
            )
        path = Path(options.model)
        source = str(path.parent) if path.name == "config.json" else options.model
        config = read_config(source, trust_remote_code=options.trust_remote_code)
    if IMAGE_CLASSIFICATION.named_by(config) is not None:
        raise UserError(
            f"check compares models that read text; {config.architectures[0]} is a chain of layers, whose "
            "every tensor is followed when a pipeline is made: docs/image_models.md lists the families"
        )
    print(f"model      {config.model_type}, transformers {transformers.__version__}")
    try:
        if recipe is None:
            adapter = guarded_adapter(ModelSpec.of(source, trust_remote_code=options.trust_remote_code))
        else:
            adapter = _checked_with_options(recipe)
        how = adapter.given_config, (num_stages, None), adapter.compared_class
        splits = recipe is not None and recipe.pipeline.schedule in SPLIT_SCHEDULES
        comparison = compare(*how, trust_remote_code=adapter.blueprint.trust_remote_code, splits_backward=splits)
    except CloneError:
        raise
    except UnsupportedModelError as error:
        print(coloured(f"verdict    not exact: {error}", RED, sys.stdout))
        return 1
    dtype = str(comparison.dtype).removeprefix("torch.")
    print(f"clone      {comparison.model_class} with small sizes and random weights, in {dtype}")
    print(f"compared   loss and {comparison.num_gradients} gradients; padded rows, 2 micro-batches, recomputation")
    for count, difference in comparison.differences.items():
        print(f"{count:2} stages  largest difference {difference:.1e} of the plain model's gradient norm")
    verdict, colour = ("exact", GREEN) if comparison.is_exact else (f"not exact: {comparison}", RED)
    print(coloured(f"verdict    {verdict}", colour, sys.stdout))
    return 0 if comparison.is_exact else 1


def _checked_with_options(recipe: Recipe) -> TextAdapter:
    """The adapter of a recipe's model. Raises UserError where a run could not cut it as the options say."""
    from hf_gpipe.adapters.text import check_reads_text
    from hf_gpipe.from_recipe.checks import checked_adapter, verify_options

    adapter = check_reads_text(checked_adapter(recipe), "check")
    verify_options(recipe, recipe.pipeline, adapter)
    return adapter

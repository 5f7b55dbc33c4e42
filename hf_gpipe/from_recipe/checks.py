"""Makes the loss of a recipe and the shape of its mini-batches, and checks its model."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import RecipeError, UserError, nearest
from hf_gpipe.from_recipe.model import model_config, spec_of
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.opening import chain_of, guarded_adapter, open_chain
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline.probe import PROBE
from hf_gpipe.pipeline.variant import Variant
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import Recipe
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.settings.kinds import IMAGES, PAIRS
from hf_gpipe.settings.pipeline import PipelineConfig

#: Kinds whose rows are no single sequence, which decoder-only models alone learn.
NOT_SEQUENCES = (*PAIRS, *IMAGES)


def check_model(recipe: Recipe) -> None:
    """Raise UserError where the recipe's model cannot be made, or not be cut as the recipe says. Makes no weights."""
    key = "r" if recipe.lora.path is None else "path"
    if recipe.lora.is_on and recipe.model.path is None:
        raise RecipeError(
            f"lora.{key} is {getattr(recipe.lora, key)} and model.path is null: adapters alone are saved, so the "
            f"weights of a new model would be lost; give model.path, or leave lora.{key} out"
        )
    adapter = checked_adapter(recipe)
    names = [name for name, _ in adapter.reference.named_modules()]
    # peft takes the last names of a target whole, and of a module to save any end.
    for section_key, before in (("target_modules", "."), ("modules_to_save", "")):
        for module in getattr(recipe.lora, section_key):
            if not any(f".{name}".endswith(before + module) for name in names):
                leaves = {name.rpartition(".")[2] for name in names}
                raise RecipeError(
                    f"lora.{section_key} has {module!r}, and the model has no such module{nearest(module, leaves)}; "
                    "correct the name, or leave it out"
                )
    pipeline = recipe.pipeline
    if isinstance(pipeline.num_stages, int):
        # By cost the planner cuts; whether there are enough layers is seen by any cut.
        strategy = "count" if pipeline.is_cut_by_cost else pipeline.partition
        cut(len(adapter.layers), pipeline.num_stages, strategy, shares_last=pipeline.shares_last_layer)


def checked_adapter(recipe: Recipe, device: torch.device | None = None) -> Adapter:
    """The adapter of the recipe's model, by its configuration alone.

    Args:
        recipe: its model and data.
        device: where autocast is observed; None: without autocast.

    Raises:
        UserError: the model cannot be made, or cannot learn the data.
    """
    config, data = model_config(recipe, None), recipe.data
    if data.kind not in NOT_SEQUENCES and config.is_encoder_decoder:
        raise RecipeError(
            f"data.kind is {data.kind}, which a decoder-only model learns, and {config.model_type} is an "
            "encoder-decoder; choose a model such as llama, or data of pairs"
        )
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # A run takes it from the tokenizer. Any token will do here.
        config.decoder_start_token_id = 0
    workload = workload_of(recipe, config)  # raises its errors before the data are read
    spec = replace(spec_of(recipe, config), model=config, config_overrides=None)
    try:
        if (chain := chain_of(spec)) is not None:
            return open_chain(spec, chain, workload.shapes, device)
        adapter = guarded_adapter(spec, device)
    except UserError:
        raise
    except Exception as error:  # whatever the family's own constructor says of its configuration
        raise RecipeError(f"model: transformers cannot make a {config.model_type} model of this: {error}") from error
    if adapter.quantisation is not None and adapter.peft is None:
        raise RecipeError(
            f"the weights at model.path {recipe.model.path!r} are quantised, and such weights are not trained; set "
            "lora.r, such as 16, or use the unquantised checkpoint"
        )
    key, most = data.length_key, adapter.num_positions.get("decoder")
    if data.kind not in NOT_SEQUENCES and most is not None and (longest := getattr(data, key)) > most:
        what = "a block of text" if data.kind == "text" else "a row"
        raise RecipeError(
            f"data.{key} is {longest}, the length of {what}, and the model has positions for {most}; use {most} or "
            "fewer, or a model with more positions"
        )
    loss_of(recipe).check_model(adapter)
    return adapter


def verify_options(recipe: Recipe, config: PipelineConfig, adapter: Adapter) -> None:
    """Raise UserError where rows or layers of the recipe's model cannot be cut as its options say.

    Tiny clones are compared, as when a `Pipeline` is made.

    Args:
        config: the recipe's, or another one to try.
        adapter: of `checked_adapter`.
    """
    packing, loss = recipe.training.packing, loss_of(recipe)
    if packing:
        PROBE.require(adapter, Variant(packing=True))
    for check in functions_of_modes("check", "check"):
        check(config, adapter, loss, packing=packing, probe=PROBE)
    for verify in functions_of_modes("check", "verify"):
        verify(config, adapter, packing=packing, probe=PROBE)


def workload_of(recipe: Recipe, config: PreTrainedConfig) -> Workload:
    """The shape of the recipe's longest mini-batch, for a model of this configuration."""
    return task_of(recipe).workload(recipe, config)


def loss_of(recipe: Recipe) -> Loss:
    """The loss of training."""
    return task_of(recipe).loss(recipe)

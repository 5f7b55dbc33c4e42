"""Makes the loss of a recipe and the shape of its mini-batches, and checks its model."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.families import UNREAD
from hf_gpipe.adapters.image_text import FORMS, images_of_row
from hf_gpipe.checkpoint.sentence_files import SentenceFiles
from hf_gpipe.data.examples.image_text import blank_row
from hf_gpipe.data.examples.images import shape_read
from hf_gpipe.errors import RecipeError, UnsupportedModelError, UserError, nearest
from hf_gpipe.from_recipe.model import model_config, spec_of
from hf_gpipe.from_recipe.processors import image_processor_of, image_text_processor_of
from hf_gpipe.from_recipe.workload import longest_mini_batch
from hf_gpipe.losses.distillation import DistillationLoss
from hf_gpipe.losses.embedding import EmbeddingLoss
from hf_gpipe.losses.grpo import GRPOLoss
from hf_gpipe.losses.kto import KTOLoss
from hf_gpipe.losses.loss import Loss, TokenLoss
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.losses.preference import PreferenceLoss
from hf_gpipe.losses.reward import RewardLoss
from hf_gpipe.model.chunks import verify_chunks
from hf_gpipe.model.opening import chain_of, guarded_adapter, open_chain
from hf_gpipe.model.packing import verify_packing
from hf_gpipe.model.tensor_parallel import check_division
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import Recipe
from hf_gpipe.runtime.chunks import check_chunks
from hf_gpipe.settings.kinds import SEQUENCE_KINDS
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import PipelineConfig


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
        cut(len(adapter.layers), pipeline.num_stages, strategy, divides_head=pipeline.divides_head)


def checked_adapter(recipe: Recipe, device: torch.device | None = None) -> Adapter:
    """The adapter of the recipe's model, by its configuration alone.

    Args:
        recipe: its model and data.
        device: where autocast is observed; None: without autocast.

    Raises:
        UserError: the model cannot be made, or cannot learn the data.
    """
    config, data = model_config(recipe, None), recipe.data
    if data.kind in SEQUENCE_KINDS and config.is_encoder_decoder:
        raise RecipeError(
            f"data.kind is {data.kind}, which a decoder-only model learns, and {config.model_type} is an "
            "encoder-decoder; choose a model such as llama, or data of pairs"
        )
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # A run takes it from the tokenizer. Any token will do here.
        config.decoder_start_token_id = 0
    if data.kind == "image_text":
        workload_of(recipe, config)  # raises its errors before the data are read
    spec = replace(spec_of(recipe, config), model=config, config_overrides=None)
    try:
        if (chain := chain_of(spec)) is not None:
            return open_chain(spec, chain, workload_of(recipe, config).shapes, device)
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
    if data.kind in SEQUENCE_KINDS and most is not None and (longest := getattr(data, key)) > most:
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
        verify_packing(adapter)
    if config.cuts_rows:
        check_chunks(adapter, is_loss_of_tokens=loss.is_of_tokens, packing=packing)
        verify_chunks(adapter, packing=packing, recomputes_blocks="block" in (config.recompute or ()))
    check_division(adapter, config.division, is_compiled=config.compiled.backend is not None)


def _workload_with_images(recipe: Recipe, config: PreTrainedConfig) -> Workload:
    data = recipe.data
    if config.model_type not in FORMS:
        reason = UNREAD.get(config.model_type, "no one has compared them with the plain model's")
        raise UnsupportedModelError(
            f"data.kind is image_text, and images of the family {config.model_type} are not read: {reason}; choose "
            f"another, such as {', '.join(sorted(FORMS)[:4])}"
        )
    images = images_of_row(config, blank_row(image_text_processor_of(recipe), data.images_per_row))
    if (most := images.places[-1] + 1) > data.max_length:
        raise RecipeError(
            f"data.max_length is {data.max_length}, and data.images_per_row {data.images_per_row} take {most} tokens; "
            "raise max_length"
        )
    return replace(longest_mini_batch(recipe, is_encoder_decoder=False), row_images=images)


def workload_of(recipe: Recipe, config: PreTrainedConfig) -> Workload:
    """The shape of the recipe's longest mini-batch, for a model of this configuration."""
    if recipe.data.kind == "image_text":
        return _workload_with_images(recipe, config)
    if recipe.data.kind != "images":
        return longest_mini_batch(recipe, is_encoder_decoder=bool(config.is_encoder_decoder))
    pixels = shape_read(image_processor_of(recipe))
    entries = {"pixel_values": pixels[None], "labels": torch.zeros(1, dtype=torch.long)}
    return Workload.of_entries(entries).of_rows(recipe.training.batch_size)


#: The losses of kinds of data that have one of their own.
_LOSSES: dict[str, type[NotingLoss]] = {
    "preferences": PreferenceLoss,
    "kto": KTOLoss,
    "rewards": RewardLoss,
    "prompts": GRPOLoss,
}


def loss_of(recipe: Recipe) -> Loss:
    """The loss of training."""
    if recipe.data.kind == "embeddings":
        files = SentenceFiles.of(recipe.model.path)
        loss = EmbeddingLoss.of(recipe.embeddings)
        pooling = loss.pooling if files.pooling is None or recipe.embeddings.pooling != AUTO else files.pooling
        return replace(loss, pooling=pooling, normalizes=files.normalizes)
    if (own := _LOSSES.get(recipe.data.kind)) is not None:
        return own.of(recipe.of_loss)
    distilled, training = recipe.distillation, recipe.training
    if distilled.teacher is None:
        return TokenLoss.of_settings(training)
    values = {name: getattr(distilled, name) for name in ("beta", "temperature", "cross_entropy_share")}
    return DistillationLoss.of_settings(training, **values)

"""Parameters of the recipes' models, counted on the meta device, beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig

from hf_gpipe.adapters.transformer_size import PAPER_SIZES, body_parameters, total_parameters
from hf_gpipe.recipe import Recipe, load_recipe
from hf_gpipe.recipe.transformer import TransformerSize
from hf_gpipe.training.from_recipe import model_config


@dataclass(frozen=True)
class Size:
    """A recipe's model.

    Attributes:
        name: of the recipe.
        transformer: its T(L, H, A), where it says so.
        total: all parameters; a tied one counts once.
        body: those of the matrices of attention and feed-forward layers.
        table: those of one embedding table.
        is_tied: whether the softmax uses the embedding's table.
        paper: what the paper prints for this T(L, H, A); None: the paper has no such model.
    """

    name: str
    transformer: str | None
    total: int
    body: int
    table: int
    is_tied: bool
    paper: int | None

    @property
    def with_softmax(self) -> int:
        """All parameters if the softmax had a table of its own, as far as it has none."""
        return self.total + (self.table if self.is_tied else 0)


def size_of(recipe: Path, overrides: Sequence[str] = ()) -> Size:
    """Raises UserError where the recipe is wrong."""
    return size_of_recipe(recipe.stem, load_recipe(recipe, overrides))


def size_of_recipe(name: str, recipe: Recipe) -> Size:
    """Of the model of a resolved recipe, under this name."""
    config = _config(recipe)
    text = recipe.model.transformer
    dial = None if text is None else str(TransformerSize.parse(text))
    return Size(
        name,
        dial,
        total_parameters(config),
        body_parameters(config),
        int(config.vocab_size) * _width(config),
        bool(getattr(config, "tie_word_embeddings", False)),
        None if dial is None else PAPER_SIZES.get(dial),
    )


def _config(recipe: Recipe) -> PreTrainedConfig:
    """With the vocabulary that the recipe's tokenizer will have."""
    model = recipe.model
    if model.path is None and "vocab_size" not in model.config:
        model = replace(model, config={**model.config, "vocab_size": recipe.tokenizer.vocab_size})
    return model_config(replace(recipe, model=model), None)


def _width(config: PreTrainedConfig) -> int:
    return int(getattr(config, "d_model", None) or config.hidden_size)

"""The tokenizer of a recipe, or what prepares its rows in place of one.

Each function takes the recipe, the corpus, and the checkpoint that a run resumes from; None: it begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.examples.image_text import read_processor
from hf_gpipe.data.examples.images import image_processor
from hf_gpipe.data.files import read_template
from hf_gpipe.data.splits import Corpus
from hf_gpipe.data.tokenizer import has_tokenizer, read_tokenizer, trained_tokenizer
from hf_gpipe.errors import DataError, RecipeError, UserError
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.recipe import Recipe


def tokenizer_of(recipe: Recipe, corpus: Corpus[Any], checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer: a resumed run's own, the one that the recipe names, or one trained on the corpus."""
    tokenizer = _tokenizer(recipe, corpus, checkpoint)
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = read_template(recipe.data.chat_template)
    return tokenizer


def _tokenizer(recipe: Recipe, corpus: Corpus[Any], checkpoint: Path | None) -> PreTrainedTokenizerBase:
    source = checkpoint or recipe.tokenizer.path or recipe.model.path
    if source is not None:
        try:
            tokenizer = read_tokenizer(source, trust_remote_code=recipe.model.trust_remote_code)
        except DataError:
            # A directory with weights alone has no tokenizer: one is trained. Of an id on the Hub nobody can tell.
            is_expected = checkpoint is not None or recipe.tokenizer.path is not None
            if is_expected or not Path(source).is_dir() or has_tokenizer(source):
                raise
        else:
            if checkpoint is None:
                _check_loaded(recipe, source)
            return tokenizer
    return trained_tokenizer(corpus, recipe.tokenizer)


def _check_loaded(recipe: Recipe, source: str | Path) -> None:
    try:
        recipe.tokenizer.check_loaded(f"{source!r} has a tokenizer; choose a model without one")
    except UserError as error:
        raise RecipeError(f"tokenizer.{error}") from None


def image_processor_of(recipe: Recipe, corpus: Any = None, checkpoint: Path | None = None) -> Any:
    """The image processor: a resumed run's own, that of `model.path`, or the default one of the model's family."""
    size = recipe.data.image_size if checkpoint is None else None
    return image_processor(checkpoint or recipe.model.path, model_config(recipe, None), size)


def image_text_processor_of(recipe: Recipe, corpus: Any = None, checkpoint: Path | None = None) -> Any:
    """The processor of images and text: a resumed run's own, or that of `model.path`."""
    assert recipe.model.path is not None, "it was checked"
    return read_processor(checkpoint or recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)

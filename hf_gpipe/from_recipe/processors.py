"""The tokenizer of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.files import read_template
from hf_gpipe.data.splits import Corpus
from hf_gpipe.data.tokenizer import has_tokenizer, read_tokenizer, trained_tokenizer
from hf_gpipe.errors import DataError, RecipeError, UserError
from hf_gpipe.recipe import Recipe


def tokenizer_of(recipe: Recipe, corpus: Corpus[Any], checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer: a resumed run's own, the one that the recipe names, or one trained on the corpus.

    Args:
        recipe: names the tokenizer or the model.
        corpus: that of the recipe.
        checkpoint: where a run resumes from; None: it begins.
    """
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

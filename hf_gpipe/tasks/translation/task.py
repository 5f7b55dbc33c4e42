"""Pairs of a recipe, of an encoder-decoder or in one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hf_gpipe.data.splits import Corpus
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.tasks.translation.buckets import training_pairs
from hf_gpipe.tasks.translation.corpus import build_corpus
from hf_gpipe.tasks.translation.evaluate import PerCharacter, TranslationReport, evaluate_translation, without_logits
from hf_gpipe.tasks.translation.stream import PairStream, StreamedCorpus
from hf_gpipe.tasks.translation.tokenized import StreamedExamples, TokenizedPairs


class _Translation(Task):
    items, evaluating = "pairs", "translating pairs"

    def read(self, recipe: Recipe) -> Any:
        return build_corpus(recipe.data, order_seed=recipe.training.seed)

    def size(self, data: DataSection, corpus: Any) -> str:
        count = len(corpus.languages)
        pairs = "streamed" if isinstance(corpus, StreamedCorpus) else f"{len(corpus.train)} training"
        return f"{pairs} pairs, {count} language{'s' * (count > 1)}"

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> TokenizedPairs | StreamedExamples:
        return (StreamedExamples if isinstance(split, PairStream) else TokenizedPairs)(
            split,
            processor,
            max_source_tokens=recipe.data.max_source_tokens,
            max_target_tokens=recipe.data.max_target_tokens,
            decoder_only=not model_config(recipe, None).is_encoder_decoder,
            language_codes=recipe.data.language_codes,
        )

    def given_characters(self, characters: int) -> Mapping[str, Any]:
        return {"compute_metrics": PerCharacter(characters), "preprocess_logits_for_metrics": without_logits}

    def evaluate(self, recipe: Recipe, pipe: Pipeline, processor: Any, corpus: Corpus[Any] | None) -> TranslationReport:
        pairs = None if corpus is None else getattr(corpus, recipe.evaluation.split)
        counts = None if corpus is None else training_pairs(corpus)
        return evaluate_translation(pipe, processor, pairs, partial(self.rows, recipe), recipe.evaluation, counts)


TASK = _Translation()

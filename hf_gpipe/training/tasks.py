"""Tasks: to translate, to predict text, to answer in conversations or as is preferred, to classify; see `data.kind`.

A task knows which corpus there is, what the rows of a mini-batch are, how the model is evaluated, what is said of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data import Corpus, PairStream, StreamedCorpus, StreamedExamples, TokenizedPairs
from hf_gpipe.data.buckets import training_pairs
from hf_gpipe.data.chat_examples import ChatExamples
from hf_gpipe.data.chats import ChatCorpus
from hf_gpipe.data.labelled import LabelledExamples
from hf_gpipe.data.preferences import PreferenceExamples
from hf_gpipe.data.text import TokenBlocks
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.training.evaluate_classes import ClassReport, evaluate_classes
from hf_gpipe.training.evaluate_preferences import PreferenceReport, evaluate_preferences
from hf_gpipe.training.evaluate_text import evaluate_text
from hf_gpipe.training.evaluate_translation import (
    Translated,
    TranslationReport,
    characters_of,
    evaluate_translation,
)
from hf_gpipe.training.from_recipe import AnyCorpus, chat_corpus_of, corpus_of, text_corpus_of


class Task(Protocol):
    """Everything that depends on the task. The argument `corpus` is what the method of this name returned."""

    @property
    def evaluating(self) -> str:
        """A description of the evaluation at the end."""

    def corpus(self) -> Any:
        """The corpus that the recipe names, in three splits. Raises DataError."""

    def corpus_text(self, corpus: Any) -> str:
        """How much there is of it."""

    def rows(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> Any:
        """A dataset of {"input_ids", "labels"} of a corpus's split."""

    def num_characters(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> int | None:
        """The characters of the references of a corpus's split; None: there are no references."""

    def evaluate(self, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> Any:
        """A report with `to_dict()`, the same in every process; those that are not the main one give None."""

    def report_text(self, report: Any) -> str:
        """A report as text for people."""

    def translations(self, report: Any) -> Sequence[Translated]:
        """The translations of a report, if it has any."""


def task_of(recipe: Recipe) -> Task:
    """The task that the kind of a recipe's data decides."""
    kinds: dict[str, type[Translation] | type[LanguageModelling]] = {
        "text": LanguageModelling,
        "chat": Chat,
        "preferences": Preferences,
        "classification": Classification,
    }
    return kinds.get(recipe.data.kind, Translation)(recipe)


@dataclass(frozen=True)
class Translation:
    """Pairs of a source and a target, for an encoder-decoder or, in one sequence, a decoder-only model."""

    recipe: Recipe

    @property
    def evaluating(self) -> str:
        """A description of the evaluation at the end."""
        return f"translating pairs of the {self.recipe.evaluation.split} split"

    def corpus(self) -> Corpus | StreamedCorpus:
        """The pairs."""
        return corpus_of(self.recipe)

    def corpus_text(self, corpus: Corpus | StreamedCorpus) -> str:
        """Pairs and languages."""
        count = len(corpus.languages)
        pairs = f"{len(corpus.train)} training" if isinstance(corpus, Corpus) else "streamed"
        return f"{pairs} pairs, {count} language{'s' * (count > 1)}"

    def rows(
        self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool
    ) -> TokenizedPairs | StreamedExamples:
        """Each pair's tokens."""
        rows = StreamedExamples if isinstance(split, PairStream) else TokenizedPairs
        return rows(
            split,
            tokenizer,
            max_source_tokens=self.recipe.data.max_source_tokens,
            max_target_tokens=self.recipe.data.max_target_tokens,
            decoder_only=decoder_only,
        )

    def num_characters(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> int | None:
        """The characters of the references, as far as their tokens are not cut."""
        data = self.recipe.data
        rows = TokenizedPairs(
            split,
            tokenizer,
            max_source_tokens=data.max_source_tokens,
            max_target_tokens=data.max_target_tokens,
            decoder_only=decoder_only,
        )
        counts: list[int] = characters_of(split, rows, tokenizer, data.max_target_tokens)
        return sum(counts)

    def evaluate(
        self, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Corpus | StreamedCorpus | None
    ) -> TranslationReport:
        """Translate, and score."""
        data, evaluation = self.recipe.data, self.recipe.evaluation
        return evaluate_translation(
            pipe,
            tokenizer,
            _evaluated(self.recipe, corpus),
            evaluation.batch_size,
            evaluation.max_new_tokens,
            max_source_tokens=data.max_source_tokens,
            max_target_tokens=data.max_target_tokens,
            max_examples=evaluation.max_examples,
            num_beams=evaluation.num_beams,
            num_samples=evaluation.samples,
            training_pairs=training_pairs(corpus) if corpus is not None else None,
        )

    def report_text(self, report: TranslationReport) -> str:
        """The quality of each language and some translations."""
        average = report.average
        parts = [
            f"Quality on held-out pairs ({self.recipe.evaluation.split} split; `copy` is the score of the source)",
            report.table(),
            *(["Each row is the mean of its languages' scores; the metrics hold every language's."] * report.is_long),
            *(["Translations", report.sample_text()] if report.samples else []),
            f"exact match {average.exact_match:.3f}, chrF {average.chrf:.1f} (copying the source: "
            f"{average.chrf_copy:.1f})",
        ]
        return "\n\n".join(parts)

    def translations(self, report: TranslationReport) -> Sequence[Translated]:
        """Of all pairs."""
        return report.translations


@dataclass(frozen=True)
class LanguageModelling:
    """Text, for a decoder-only model."""

    recipe: Recipe

    @property
    def evaluating(self) -> str:
        """A description of the evaluation at the end."""
        return f"predicting the text of the {self.recipe.evaluation.split} split"

    def corpus(self) -> Any:
        """The documents."""
        return text_corpus_of(self.recipe)

    def corpus_text(self, corpus: Any) -> str:
        """Documents and the length of their blocks."""
        return f"{len(corpus.train)} training documents in blocks of {self.recipe.data.max_target_tokens} tokens"

    def rows(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> Any:
        """Blocks of the documents' tokens."""
        return TokenBlocks(split, tokenizer, self.recipe.data.max_target_tokens)

    def num_characters(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> int | None:
        """Text has no references."""
        return None

    def evaluate(self, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> Any:
        """The loss on held-out blocks."""

        def rows() -> Any:
            assert tokenizer is not None, "the reader has prepared the data"
            return self.rows(_evaluated(self.recipe, corpus), tokenizer, decoder_only=True)

        evaluation = self.recipe.evaluation
        return evaluate_text(pipe, rows, evaluation.batch_size, max_rows=evaluation.max_examples)

    def report_text(self, report: Any) -> str:
        """Loss and perplexity."""
        split = self.recipe.evaluation.split
        return f"Quality on held-out text ({split} split, {report.num_tokens} tokens)\n\n{report.text()}"

    def translations(self, report: Any) -> Sequence[Translated]:
        """None."""
        return ()


@dataclass(frozen=True)
class Chat(LanguageModelling):
    """Conversations, for a decoder-only model."""

    @property
    def evaluating(self) -> str:
        """A description of the evaluation at the end."""
        return f"predicting the targets in conversations of the {self.recipe.evaluation.split} split"

    def corpus(self) -> ChatCorpus:
        """The conversations."""
        return chat_corpus_of(self.recipe)

    def corpus_text(self, corpus: ChatCorpus) -> str:
        """Conversations and their longest length."""
        return f"{len(corpus.train)} training conversations of up to {self.recipe.data.max_length} tokens"

    def rows(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> ChatExamples:
        """The tokens of the conversations, with the labels of those that are learnt."""
        data = self.recipe.data
        return ChatExamples(
            split,
            tokenizer,
            max_length=data.max_length,
            truncation_mode=data.truncation_mode,
            assistant_only_loss=data.assistant_only_loss,
            completion_only_loss=data.completion_only_loss,
        )


@dataclass(frozen=True)
class Preferences(LanguageModelling):
    """Prompts with a chosen and a rejected answer, for a decoder-only model."""

    @property
    def evaluating(self) -> str:
        """A description of the evaluation at the end."""
        return f"comparing the answers of the {self.recipe.evaluation.split} split"

    def corpus(self) -> ChatCorpus:
        """The preferences."""
        return chat_corpus_of(self.recipe)

    def corpus_text(self, corpus: ChatCorpus) -> str:
        """Pairs and their longest length."""
        return f"{len(corpus.train)} training pairs of answers of up to {self.recipe.data.max_length} tokens"

    def rows(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> PreferenceExamples:
        """The tokens of prompts and answers."""
        return PreferenceExamples(split, tokenizer, max_length=self.recipe.data.max_length)

    def evaluate(self, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> PreferenceReport:
        """How often the chosen answer is the more likely one."""

        def rows() -> PreferenceExamples:
            assert tokenizer is not None, "the reader has prepared the data"
            return self.rows(_evaluated(self.recipe, corpus), tokenizer, decoder_only=True)

        evaluation = self.recipe.evaluation
        return evaluate_preferences(pipe, rows, evaluation.batch_size, max_pairs=evaluation.max_examples)

    def report_text(self, report: PreferenceReport) -> str:
        """The shares and the mean log-probabilities."""
        split = self.recipe.evaluation.split
        return f"Quality on held-out preferences ({split} split, {report.num_pairs} pairs)\n\n{report.text()}"


@dataclass(frozen=True)
class Classification(LanguageModelling):
    """Texts with a label, for a decoder-only model with a head of classes."""

    @property
    def evaluating(self) -> str:
        """A description of the evaluation at the end."""
        return f"classifying the texts of the {self.recipe.evaluation.split} split"

    def corpus(self) -> ChatCorpus:
        """The texts with their labels."""
        return chat_corpus_of(self.recipe)

    def corpus_text(self, corpus: ChatCorpus) -> str:
        """Texts, classes and the longest length."""
        data = self.recipe.data
        return f"{len(corpus.train)} training texts of up to {data.max_length} tokens, {len(data.labels)} classes"

    def rows(self, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> LabelledExamples:
        """The tokens of the texts, and their classes."""
        data = self.recipe.data
        return LabelledExamples(split, tokenizer, labels=data.labels, max_length=data.max_length)

    def evaluate(self, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> ClassReport:
        """Loss and accuracy."""

        def rows() -> LabelledExamples:
            assert tokenizer is not None, "the reader has prepared the data"
            return self.rows(_evaluated(self.recipe, corpus), tokenizer, decoder_only=True)

        evaluation = self.recipe.evaluation
        return evaluate_classes(pipe, rows, evaluation.batch_size, max_rows=evaluation.max_examples)

    def report_text(self, report: ClassReport) -> str:
        """Loss and accuracy."""
        split = self.recipe.evaluation.split
        return f"Quality on held-out texts ({split} split, {report.num_rows} texts)\n\n{report.text()}"


def _evaluated(recipe: Recipe, corpus: AnyCorpus | None) -> Any:
    """The split to evaluate on."""
    if corpus is None:
        return None
    return corpus.test if recipe.evaluation.split == "test" else corpus.validation

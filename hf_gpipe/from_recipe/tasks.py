"""Tasks: to translate, to predict text, to answer in conversations or as is preferred, to classify; see `data.kind`.

A task is a record in `TASKS`: which corpus there is, what the rows of a mini-batch are, and how the model is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, default_data_collator

from hf_gpipe.data import PairStream, StreamedCorpus, StreamedExamples, TokenizedPairs, build_corpus
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.chat_examples import ChatExamples
from hf_gpipe.data.examples.chats import Conversation, Read, chat_corpus, preference_of
from hf_gpipe.data.examples.embeddings import EmbeddingExamples, embedded_of
from hf_gpipe.data.examples.image_text import ImageTextCollator, ImageTextExamples, image_text_corpus
from hf_gpipe.data.examples.images import ImageExamples, image_corpus
from hf_gpipe.data.examples.kto import KTOExamples, judged_of
from hf_gpipe.data.examples.labelled import LabelCollator, LabelledExamples, labelled_of
from hf_gpipe.data.examples.preferences import PreferenceExamples
from hf_gpipe.data.examples.prompts import PromptExamples, prompted_of
from hf_gpipe.data.examples.rewards import RewardExamples, compared_of
from hf_gpipe.data.examples.steps import StepExamples, stepwise_of
from hf_gpipe.data.examples.text import TokenBlocks, text_corpus
from hf_gpipe.data.splits import Corpus
from hf_gpipe.data.translation.buckets import training_pairs
from hf_gpipe.errors import DataError
from hf_gpipe.from_recipe.checks import image_text_processor_of, processor_of, tokenizer_of
from hf_gpipe.from_recipe.evaluate_translation import (
    TranslationReport,
    characters_of,
    evaluate_translation,
)
from hf_gpipe.from_recipe.held_out import (
    Evaluate,
    HeldOut,
    HeldOutReport,
    evaluate_classes,
    evaluate_completions,
    evaluate_embeddings,
    evaluate_images,
    evaluate_judged,
    evaluate_preferences,
    evaluate_rewards,
    evaluate_steps,
    evaluate_text,
)
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.recipe.data import PAIRS

Report = HeldOutReport | TranslationReport
"""The result of an evaluation, the same in every process."""


def _padding(tokenizer: PreTrainedTokenizerBase, pipe: Pipeline) -> PairCollator:
    if pipe.adapter.is_classifier:
        return LabelCollator.for_config(pipe.adapter.config)
    return PairCollator.for_tokenizer(tokenizer)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that depends on the task.

    Attributes:
        evaluating: the evaluation at the end, in words, which go on with the name of the split.
        items: what a corpus consists of, in messages.
        read: the corpus that a recipe names, in three splits. Raises DataError.
        size: how much there is of it, in words.
        rows: (data, split of a corpus, tokenizer, `decoder_only`) -> a dataset of rows to collate.
        evaluate: (recipe, model, and of the main process the tokenizer and the corpus) -> the report.
        num_characters: of the arguments of `rows`, the characters of the references; None: there are no references.
        processor: (recipe, corpus, checkpoint) -> the tokenizer, or what prepares rows in its place.
        collator: (that, model) -> rows to a mini-batch.
    """

    evaluating: str
    items: str
    read: Callable[[Recipe], Any]
    size: Callable[[DataSection, Any], str]
    rows: Callable[..., Any]
    evaluate: Callable[[Recipe, Pipeline, PreTrainedTokenizerBase | None, Corpus[Any] | None], Report]
    num_characters: Callable[..., int] | None = None
    processor: Callable[[Recipe, Any, Path | None], Any] = tokenizer_of
    collator: Callable[[Any, Pipeline], Any] = _padding

    def corpus(self, recipe: Recipe) -> Any:
        """The corpus that the recipe names, with something to evaluate on. Raises DataError."""
        corpus = self.read(recipe)
        for split in ("test", "validation"):
            is_needed = recipe.evaluation.split == split or (split == "validation" and recipe.training.eval_steps)
            if is_needed and not getattr(corpus, split):
                raise DataError(
                    f"the corpus has no {split} {self.items} to evaluate on; raise data.{split}_fraction, or ask for "
                    "more examples"
                )
        return corpus


def task_of(recipe: Recipe) -> Task:
    """The task that the kind of a recipe's data decides."""
    return TASKS[recipe.data.kind]


# ---------------------------------------------------------------------- pairs, of an encoder-decoder or in one sequence


def _pairs_size(data: DataSection, corpus: Any) -> str:
    count = len(corpus.languages)
    pairs = "streamed" if isinstance(corpus, StreamedCorpus) else f"{len(corpus.train)} training"
    return f"{pairs} pairs, {count} language{'s' * (count > 1)}"


def _pairs_rows(
    data: DataSection, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool
) -> TokenizedPairs | StreamedExamples:
    return (StreamedExamples if isinstance(split, PairStream) else TokenizedPairs)(
        split,
        tokenizer,
        max_source_tokens=data.max_source_tokens,
        max_target_tokens=data.max_target_tokens,
        decoder_only=decoder_only,
    )


def _num_characters(data: DataSection, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> int:
    """The characters of the references, as far as their tokens are not cut."""
    rows = _pairs_rows(data, split, tokenizer, decoder_only=decoder_only)
    assert isinstance(rows, TokenizedPairs), "held-out pairs are in memory"
    return sum(characters_of(split, rows, tokenizer, data.max_target_tokens))


def _translate(
    recipe: Recipe, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any
) -> TranslationReport:
    data, evaluation = recipe.data, recipe.evaluation
    return evaluate_translation(
        pipe,
        tokenizer,
        None if corpus is None else getattr(corpus, evaluation.split),
        evaluation.batch_size,
        evaluation.max_new_tokens,
        max_source_tokens=data.max_source_tokens,
        max_target_tokens=data.max_target_tokens,
        max_examples=evaluation.max_examples,
        num_beams=evaluation.num_beams,
        num_samples=evaluation.samples,
        training_pairs=training_pairs(corpus) if corpus is not None else None,
    )


# ---------------------------------------------------------------------- sequences, of a decoder-only model

Make = Callable[[DataSection, Any, PreTrainedTokenizerBase], Any]
"""(data, split of a corpus, tokenizer) -> its rows."""


def _of_sequences(measure: Evaluate, make: Make, **of_task: Any) -> Task:
    """A task of a decoder-only model: how it is measured on held-out rows, and what makes rows of a corpus's split."""

    def rows(data: DataSection, split: Any, tokenizer: PreTrainedTokenizerBase, *, decoder_only: bool) -> Any:
        return make(data, split, tokenizer)

    def evaluate(recipe: Recipe, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> Report:
        return measure(pipe, _held_out(recipe, make, tokenizer, corpus))

    return Task(rows=rows, evaluate=evaluate, **of_task)


def _held_out(recipe: Recipe, make: Make, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> HeldOut:
    """The rows of the split that the recipe evaluates on."""

    def make_rows() -> Any:
        assert tokenizer is not None, "the reader has prepared the data"
        return make(recipe.data, getattr(corpus, recipe.evaluation.split), tokenizer)

    return HeldOut(make_rows, recipe.evaluation.batch_size, recipe.evaluation.max_examples)


def _chats(recipe: Recipe, items: str, read: Read | None = None) -> Corpus[Conversation]:
    return chat_corpus(recipe.data, read, items, _evaluated(recipe))


def _of_length(items: str) -> Callable[[DataSection, Any], str]:
    """Words for the size of a corpus of such items, each of which has a largest length."""
    return lambda data, corpus: f"{len(corpus.train)} training {items} of up to {data.max_length} tokens"


def _evaluated(recipe: Recipe) -> set[str]:
    """The splits that the recipe evaluates on."""
    return {recipe.evaluation.split, *(["validation"] if recipe.training.eval_steps else [])}


def _prompts(data: DataSection, split: Any, tokenizer: PreTrainedTokenizerBase) -> PromptExamples:
    return PromptExamples([prompt.row for prompt in split], tokenizer, max_length=data.max_length)


def _complete(recipe: Recipe, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> Report:
    held_out = _held_out(recipe, _prompts, tokenizer, corpus)
    return evaluate_completions(pipe, held_out, tokenizer, recipe.grpo.reward, recipe.grpo.max_completion_length)


def _labelled(recipe: Recipe) -> Corpus[Conversation]:
    data = recipe.data
    read = partial(labelled_of, labels=data.labels, text_field=data.text_field, label_field=data.label_field)
    return _chats(recipe, "texts", read)


def _of_answers(measure: Evaluate, examples: Any, read: Read, evaluating: str, items: str, sized: str = "") -> Task:
    """A task whose examples are made of rows by their class and cut to a length; `sized` is the word for their size."""
    return _of_sequences(
        measure,
        lambda data, split, tokenizer: examples(split, tokenizer, max_length=data.max_length),
        evaluating=evaluating,
        items=items,
        read=lambda recipe: _chats(recipe, items, read),
        size=_of_length(sized or items),
    )


TASKS: dict[str, Task] = {
    **dict.fromkeys(
        PAIRS,
        Task(
            evaluating="translating pairs",
            items="pairs",
            read=lambda recipe: build_corpus(recipe.data, order_seed=recipe.training.seed),
            size=_pairs_size,
            rows=_pairs_rows,
            evaluate=_translate,
            num_characters=_num_characters,
        ),
    ),
    "text": _of_sequences(
        evaluate_text,
        lambda data, split, tokenizer: TokenBlocks(split, tokenizer, data.max_target_tokens),
        evaluating="predicting the text",
        items="documents",
        read=lambda recipe: text_corpus(recipe.data),
        size=lambda data, corpus: (
            f"{len(corpus.train)} training documents in blocks of {data.max_target_tokens} tokens"
        ),
    ),
    "chat": _of_sequences(
        evaluate_text,
        lambda data, split, tokenizer: ChatExamples(
            split,
            tokenizer,
            max_length=data.max_length,
            truncation_mode=data.truncation_mode,
            assistant_only_loss=data.assistant_only_loss,
            completion_only_loss=data.completion_only_loss,
        ),
        evaluating="predicting the targets in conversations",
        items="conversations",
        read=lambda recipe: _chats(recipe, "conversations"),
        size=_of_length("conversations"),
    ),
    "preferences": _of_answers(
        *(evaluate_preferences, PreferenceExamples, preference_of),
        *("comparing the answers", "preferences", "pairs of answers"),
    ),
    "kto": _of_answers(evaluate_judged, KTOExamples, judged_of, "comparing the answers", "answers"),
    "rewards": _of_answers(
        *(evaluate_rewards, RewardExamples, compared_of), *("scoring the answers", "preferences", "pairs of answers")
    ),
    "embeddings": _of_sequences(
        evaluate_embeddings,
        lambda data, split, tokenizer: EmbeddingExamples(split, tokenizer, max_length=data.max_length),
        evaluating="comparing the texts",
        items="examples",
        read=lambda recipe: _chats(recipe, "examples", partial(embedded_of, texts=recipe.embeddings.num_texts)),
        size=_of_length("examples of texts"),
    ),
    "prompts": Task(
        evaluating="completing the prompts",
        items="prompts",
        read=lambda recipe: _chats(recipe, "prompts", prompted_of),
        size=_of_length("prompts"),
        rows=lambda data, split, tokenizer, decoder_only: _prompts(data, split, tokenizer),
        evaluate=_complete,
    ),
    "process_rewards": _of_sequences(
        evaluate_steps,
        lambda data, split, tokenizer: StepExamples(
            split,
            tokenizer,
            step_separator=data.step_separator,
            max_length=data.max_length,
            last_step_only=data.last_step_only,
        ),
        evaluating="judging the steps",
        items="answers",
        read=lambda recipe: _chats(recipe, "answers", stepwise_of),
        size=_of_length("answers"),
    ),
    "classification": _of_sequences(
        evaluate_classes,
        lambda data, split, tokenizer: LabelledExamples(
            split, tokenizer, labels=data.labels, max_length=data.max_length
        ),
        evaluating="classifying the texts",
        items="texts",
        read=_labelled,
        size=lambda data, corpus: (
            f"{len(corpus.train)} training texts of up to {data.max_length} tokens, {len(data.labels)} classes"
        ),
    ),
    "images": _of_sequences(
        evaluate_images,
        lambda data, split, processor: ImageExamples(split, processor),
        evaluating="classifying the images",
        items="images",
        read=lambda recipe: image_corpus(recipe.data, _evaluated(recipe)),
        size=lambda data, corpus: f"{len(corpus.train)} training images, {len(data.labels)} classes",
        processor=lambda recipe, corpus, checkpoint: processor_of(recipe, checkpoint),
        collator=lambda processor, pipe: default_data_collator,
    ),
    "image_text": _of_sequences(
        partial(evaluate_text, collate=ImageTextCollator(0)),
        lambda data, split, processor: ImageTextExamples(
            split,
            processor,
            max_length=data.max_length,
            completion_only_loss=data.completion_only_loss and "completion" in split.features,
            text_field=data.text_field,
        ),
        evaluating="predicting the text beside images",
        items="rows",
        read=lambda recipe: image_text_corpus(recipe.data, _evaluated(recipe)),
        size=_of_length("rows of images and text"),
        processor=lambda recipe, corpus, checkpoint: image_text_processor_of(recipe, checkpoint),
        collator=lambda processor, pipe: ImageTextCollator(
            PairCollator.for_tokenizer(processor.tokenizer).pad_token_id
        ),
    ),
}
"""The task of each kind of data."""

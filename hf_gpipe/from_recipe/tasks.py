"""Tasks: to translate, to predict text, to answer in conversations or as is preferred, to classify; see `data.kind`.

A task is a record in `TASKS`: which corpus there is, what the rows of a mini-batch are, which trainer trains on them,
and how the model is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase, default_data_collator

from hf_gpipe.checkpoint.sentence_files import SentenceFiles
from hf_gpipe.data import PairStream, StreamedCorpus, StreamedExamples, TokenizedPairs, build_corpus
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.chat_examples import ChatExamples
from hf_gpipe.data.examples.chats import conversation_of, preference_of
from hf_gpipe.data.examples.embeddings import EmbeddingExamples, embedded_of
from hf_gpipe.data.examples.image_text import ImageTextCollator, ImageTextExamples, image_text_corpus
from hf_gpipe.data.examples.images import ImageExamples, image_corpus
from hf_gpipe.data.examples.kto import KTOExamples, judged_of
from hf_gpipe.data.examples.labelled import LabelCollator, LabelledExamples, labelled_of
from hf_gpipe.data.examples.preferences import PreferenceExamples
from hf_gpipe.data.examples.prompts import PromptExamples, prompted_of
from hf_gpipe.data.examples.rewards import RewardExamples, compared_of
from hf_gpipe.data.examples.rows import Read, ReadRow, corpus_of_rows
from hf_gpipe.data.examples.text import TokenBlocks, text_corpus
from hf_gpipe.data.splits import Corpus
from hf_gpipe.data.translation.buckets import training_pairs
from hf_gpipe.errors import DataError
from hf_gpipe.from_recipe.checkable import checked_by
from hf_gpipe.from_recipe.evaluate_translation import TranslationReport, evaluate_translation
from hf_gpipe.from_recipe.held_out import (
    Evaluate,
    HeldOut,
    HeldOutReport,
    accuracy,
    evaluate_classes,
    evaluate_completions,
    evaluate_embeddings,
    evaluate_images,
    evaluate_judged,
    evaluate_preferences,
    evaluate_rewards,
    evaluate_text,
)
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.from_recipe.processors import image_processor_of, image_text_processor_of, tokenizer_of
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.settings.kinds import PAIRS
from hf_gpipe.trainers.dpo import PipelineDPOConfig, PipelineDPOTrainer
from hf_gpipe.trainers.embeddings import PipelineEmbeddingConfig, PipelineEmbeddingTrainer, lower_case
from hf_gpipe.trainers.grpo import PipelineGRPOConfig, PipelineGRPOTrainer
from hf_gpipe.trainers.kto import PipelineKTOConfig, PipelineKTOTrainer
from hf_gpipe.trainers.reward import PipelineRewardConfig, PipelineRewardTrainer
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.loader import Collate
from hf_gpipe.training.trainer import PipelineTrainer

Report = HeldOutReport | TranslationReport
"""The result of an evaluation, the same in every process."""

Rows = Callable[[Recipe, Any, Any], Any]
"""(recipe, split of a corpus, tokenizer) -> a dataset of rows to collate."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that depends on the task, but for the head of its model (from_recipe/model.py) and its loss.

    Attributes:
        evaluating: the evaluation at the end, in words, which go on with the name of the split.
        items: what a corpus consists of, in messages.
        read: the corpus that a recipe names, in three splits. Raises DataError.
        size: how much there is of it, in words.
        rows: (recipe, split of a corpus, tokenizer) -> a dataset of rows to collate. A dataset of pairs has also
            `num_characters`, by which the validation loss per character is computed.
        evaluate: (recipe, model, and of the main process the tokenizer and the corpus) -> the report.
        processor: (recipe, corpus, checkpoint) -> the tokenizer, or what prepares rows in its place.
        collator: (that, model) -> rows to a mini-batch; None: the trainer has one.
        trainer: its class.
        arguments: the class of its arguments.
        given: what it is given of a recipe beside the pipeline, the arguments and the data.
    """

    evaluating: str
    items: str
    read: Callable[[Recipe], Any]
    size: Callable[[DataSection, Any], str]
    rows: Rows
    evaluate: Callable[[Recipe, Pipeline, Any, Corpus[Any] | None], Report]
    processor: Callable[..., Any] = tokenizer_of
    collator: Callable[[Any, Pipeline], Collate] | None = lambda tokenizer, pipe: PairCollator.for_tokenizer(tokenizer)
    trainer: Callable[..., PipelineTrainer] = PipelineTrainer
    arguments: type[PipelineTrainingArguments] = PipelineTrainingArguments
    given: Callable[[Recipe], Mapping[str, Any]] = lambda recipe: {}

    def corpus(self, recipe: Recipe) -> Any:
        """The corpus that the recipe names, with something to evaluate on. Raises DataError."""
        corpus = self.read(recipe)
        for split in ("test", "validation"):
            if split in _evaluated(recipe) and not getattr(corpus, split):
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


def _pairs_rows(recipe: Recipe, split: Any, tokenizer: PreTrainedTokenizerBase) -> TokenizedPairs | StreamedExamples:
    return (StreamedExamples if isinstance(split, PairStream) else TokenizedPairs)(
        split,
        tokenizer,
        max_source_tokens=recipe.data.max_source_tokens,
        max_target_tokens=recipe.data.max_target_tokens,
        decoder_only=not model_config(recipe, None).is_encoder_decoder,
        language_codes=recipe.data.language_codes,
    )


def _translate(
    recipe: Recipe, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any
) -> TranslationReport:
    pairs = None if corpus is None else getattr(corpus, recipe.evaluation.split)
    counts = None if corpus is None else training_pairs(corpus)
    return evaluate_translation(pipe, tokenizer, pairs, partial(_pairs_rows, recipe), recipe.evaluation, counts)


# ---------------------------------------------------------------------- one sequence, or image, of a row


def _held_out(recipe: Recipe, rows: Rows, tokenizer: Any, corpus: Any) -> HeldOut:
    """The rows of the split that the recipe evaluates on."""
    return HeldOut(
        lambda: rows(recipe, getattr(corpus, recipe.evaluation.split), tokenizer),
        recipe.evaluation.batch_size,
        recipe.evaluation.max_examples,
    )


def _measured(measure: Evaluate, rows: Rows, **of_task: Any) -> Task:
    """A task that is measured on its held-out rows alone."""

    def evaluate(recipe: Recipe, pipe: Pipeline, tokenizer: Any, corpus: Any) -> Report:
        return measure(pipe, _held_out(recipe, rows, tokenizer, corpus))

    return Task(rows=rows, evaluate=evaluate, **of_task)


def _embedded(recipe: Recipe, split: Any, tokenizer: Any) -> EmbeddingExamples:
    if SentenceFiles.of(recipe.model.path).lowers_case:
        lower_case(tokenizer)
    return EmbeddingExamples(split, tokenizer, max_length=recipe.data.max_length)


def _of_answers(measure: Evaluate, examples: Any, read: Read, **of_task: Any) -> Task:
    """A task with a trainer of its own, whose rows its examples read, cut to a length."""
    return _measured(
        measure,
        lambda recipe, split, tokenizer: examples(split, tokenizer, max_length=recipe.data.max_length),
        read=lambda recipe: _rows(recipe, of_task["items"], read),
        collator=None,
        **of_task,
    )


def _rows(recipe: Recipe, items: str, read: Read) -> Corpus[ReadRow]:
    return corpus_of_rows(recipe.data, read, items, _evaluated(recipe))


def _of_length(items: str) -> Callable[[DataSection, Any], str]:
    """Words for the size of a corpus of such items, each of which has a largest length."""
    return lambda data, corpus: f"{len(corpus.train)} training {items} of up to {data.max_length} tokens"


def _evaluated(recipe: Recipe) -> set[str]:
    """The splits that the recipe evaluates on."""
    return {recipe.evaluation.split, *(["validation"] if recipe.training.eval_steps else [])}


def _prompts(recipe: Recipe, split: Any, tokenizer: PreTrainedTokenizerBase) -> PromptExamples:
    return PromptExamples([prompt.row for prompt in split], tokenizer, max_length=recipe.data.max_length)


def _complete(recipe: Recipe, pipe: Pipeline, tokenizer: PreTrainedTokenizerBase | None, corpus: Any) -> Report:
    held_out = _held_out(recipe, _prompts, tokenizer, corpus)
    return evaluate_completions(pipe, held_out, tokenizer, recipe.grpo.reward, recipe.grpo.max_completion_length)


def _labelled(recipe: Recipe) -> Corpus[ReadRow]:
    data = recipe.data
    read = partial(labelled_of, labels=data.labels, text_field=data.text_field, label_field=data.label_field)
    return _rows(recipe, "texts", read)


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
        ),
    ),
    "text": _measured(
        evaluate_text,
        lambda recipe, split, tokenizer: TokenBlocks(split, tokenizer, recipe.data.max_target_tokens),
        evaluating="predicting the text",
        items="documents",
        read=lambda recipe: text_corpus(recipe.data),
        size=lambda data, corpus: (
            f"{len(corpus.train)} training documents in blocks of {data.max_target_tokens} tokens"
        ),
    ),
    "chat": _measured(
        evaluate_text,
        lambda recipe, split, tokenizer: ChatExamples(
            split,
            tokenizer,
            max_length=recipe.data.max_length,
            truncation_mode=recipe.data.truncation_mode,
            assistant_only_loss=recipe.data.assistant_only_loss,
            completion_only_loss=recipe.data.completion_only_loss,
        ),
        evaluating="predicting the targets in conversations",
        items="conversations",
        read=lambda recipe: _rows(recipe, "conversations", conversation_of),
        size=_of_length("conversations"),
    ),
    "preferences": _of_answers(
        *(evaluate_preferences, PreferenceExamples, preference_of),
        evaluating="comparing the answers",
        items="preferences",
        size=_of_length("pairs of answers"),
        trainer=PipelineDPOTrainer,
        arguments=PipelineDPOConfig,
    ),
    "kto": _of_answers(
        *(evaluate_judged, KTOExamples, judged_of),
        evaluating="comparing the answers",
        items="answers",
        size=_of_length("answers"),
        trainer=PipelineKTOTrainer,
        arguments=PipelineKTOConfig,
    ),
    "rewards": _of_answers(
        *(evaluate_rewards, RewardExamples, compared_of),
        evaluating="scoring the answers",
        items="preferences",
        size=_of_length("pairs of answers"),
        trainer=PipelineRewardTrainer,
        arguments=PipelineRewardConfig,
    ),
    "embeddings": _measured(
        evaluate_embeddings,
        _embedded,
        evaluating="comparing the texts",
        items="examples",
        read=lambda recipe: _rows(recipe, "examples", partial(embedded_of, texts=recipe.embeddings.num_texts)),
        size=_of_length("examples of texts"),
        collator=None,
        trainer=PipelineEmbeddingTrainer,
        arguments=PipelineEmbeddingConfig,
    ),
    "prompts": Task(
        evaluating="completing the prompts",
        items="prompts",
        read=lambda recipe: _rows(recipe, "prompts", prompted_of),
        size=_of_length("prompts"),
        rows=_prompts,
        evaluate=_complete,
        collator=None,
        trainer=PipelineGRPOTrainer,
        arguments=PipelineGRPOConfig,
        given=lambda recipe: {"reward_funcs": checked_by(recipe.grpo.reward)},
    ),
    "classification": _measured(
        evaluate_classes,
        lambda recipe, split, tokenizer: LabelledExamples(
            split, tokenizer, labels=recipe.data.labels, max_length=recipe.data.max_length
        ),
        evaluating="classifying the texts",
        items="texts",
        read=_labelled,
        size=lambda data, corpus: (
            f"{len(corpus.train)} training texts of up to {data.max_length} tokens, {len(data.labels)} classes"
        ),
        collator=lambda tokenizer, pipe: LabelCollator.for_config(pipe.adapter.config),
        given=lambda recipe: {"compute_metrics": accuracy},
    ),
    "images": _measured(
        evaluate_images,
        lambda recipe, split, processor: ImageExamples(split, processor),
        evaluating="classifying the images",
        items="images",
        read=lambda recipe: image_corpus(recipe.data, _evaluated(recipe)),
        size=lambda data, corpus: f"{len(corpus.train)} training images, {len(data.labels)} classes",
        processor=image_processor_of,
        collator=lambda processor, pipe: default_data_collator,
        given=lambda recipe: {"compute_metrics": accuracy},
    ),
    "image_text": _measured(
        partial(evaluate_text, collate=ImageTextCollator(0)),
        lambda recipe, split, processor: ImageTextExamples(
            split,
            processor,
            max_length=recipe.data.max_length,
            completion_only_loss=recipe.data.completion_only_loss and "completion" in split.features,
            text_field=recipe.data.text_field,
        ),
        evaluating="predicting the text beside images",
        items="rows",
        read=lambda recipe: image_text_corpus(recipe.data, _evaluated(recipe)),
        size=_of_length("rows of images and text"),
        processor=image_text_processor_of,
        collator=lambda processor, pipe: ImageTextCollator(
            PairCollator.for_tokenizer(processor.tokenizer).pad_token_id
        ),
    ),
}
"""The task of each kind of data."""

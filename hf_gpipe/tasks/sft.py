"""Supervised fine-tuning on conversations, prompts with completions or texts, as TRL's SFTTrainer does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import has_ids
from hf_gpipe.data.chat_examples import ChatExamples, SFTCollator, SFTExamples
from hf_gpipe.data.chats import conversation_of
from hf_gpipe.data.packed_rows import STRATEGIES
from hf_gpipe.data.rows import Read
from hf_gpipe.data.stream import Block, EncodedStream
from hf_gpipe.errors import UserError, check_choice
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, evaluate_text
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.losses.token_metrics import TokenMetrics, means
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import Recipe
from hf_gpipe.tasks.image_text import ImageTextCollator, ImageTextExamples
from hf_gpipe.trainers.arguments import LanguageModelArguments
from hf_gpipe.trainers.trainer import TaskTrainer
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.base import default_collator, example_of
from hf_gpipe.training.loader import Batch, Collate
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.predicting import Preprocess

_NOT_PREPARED = "dataset_kwargs has skip_prepare_dataset=True, so the collator gets the rows as they are"


@dataclass
class PipelineSFTConfig(LanguageModelArguments):
    """Arguments of `PipelineSFTTrainer`: those of `PipelineTrainer`, and TRL's SFTConfig's by their names.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*LanguageModelArguments._VALID_DICT_FIELDS, "dataset_kwargs"]

    learning_rate: float = argument(2e-5, "Peak learning rate.")
    chat_template_path: str | None = argument(None, "File with the chat template; its name ends in .jinja or .j2.")
    dataset_text_field: str = argument("text", "The column of texts.")
    dataset_kwargs: dict[str, Any] | str | None = argument(
        None, "`skip_prepare_dataset: True`: the data_collator gets the rows as they are."
    )
    dataset_num_proc: int | None = argument(None, "Has no effect: the main process tokenises and packs the rows.")
    eos_token: str | None = argument(None, "The token that ends a text; None: the tokenizer's.")
    pad_token: str | None = argument(
        None, "The token that fills rows; None: the tokenizer's, or its end-of-sequence token."
    )
    max_length: int | None = argument(
        1024, "Maximum number of tokens of a row or, with packing, of a packed row; None: rows are not cut."
    )
    truncation_mode: str = argument("keep_start", "The end of a row that is kept: keep_start or keep_end.")
    shuffle_dataset: bool = argument(False, "Whether the rows are shuffled once, before the training.")
    packing: bool = argument(
        False,
        "Whether rows are packed into rows of up to max_length tokens; a packed row counts as one row of the batch.",
    )
    packing_strategy: str = argument("bfd", "bfd, bfd_split or wrapped.")
    eval_packing: bool | None = argument(None, "Whether rows are packed for evaluation; None: as `packing` says.")
    padding_free: bool = argument(False, "Whether micro-batches have no padding; it needs max_length=None or packing.")
    pad_to_multiple_of: int | str | None = argument(
        "auto", "None or auto: a micro-batch is as wide as its longest row; other values are not supported."
    )
    completion_only_loss: bool | None = argument(
        None, "Whether only completions are learnt, and not prompts; None: where rows have a prompt and a completion."
    )
    assistant_only_loss: bool = argument(
        False, "Whether only the assistant's turns are learnt; rows then need messages."
    )
    loss_type: str = argument("nll", "nll, or dft (Dynamic Fine-Tuning).")
    activation_offloading: bool = argument(False, "Not supported: set recompute='host'.")

    def check(self) -> None:
        super().check()
        if self.loss_type == "chunked_nll":  # TRL's older name
            self.loss_type = "nll"
        check_choice("loss_type", self.loss_type, ("nll", "dft"))
        check_choice("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        check_choice("packing_strategy", self.packing_strategy, STRATEGIES)
        if self.activation_offloading:
            raise UserError("activation_offloading=True is not supported; set recompute='host', for each stage or all")
        if self.pad_to_multiple_of not in (None, "auto"):
            raise UserError(
                f"pad_to_multiple_of={self.pad_to_multiple_of!r} is not supported: each micro-batch is as wide as its "
                "longest row; leave it out"
            )
        if self.chat_template_path is not None and not self.chat_template_path.endswith((".jinja", ".j2")):
            raise UserError(
                f"chat_template_path={self.chat_template_path!r}: the template of another tokenizer may need new "
                "tokens; give a file that ends in .jinja or .j2, or add the tokens, resize the model and set "
                "tokenizer.chat_template before"
            )
        options = self.dataset_kwargs if isinstance(self.dataset_kwargs, dict) else {}
        if unknown := options.keys() - {"skip_prepare_dataset"}:
            raise UserError(f"dataset_kwargs: {min(unknown)!r} is not supported; only skip_prepare_dataset is")
        if self.padding_free and not self.packing and self.max_length is not None:
            raise UserError(
                f"padding_free=True without packing, and max_length={self.max_length}: as in TRL, `max_length` is not "
                "enforced then; set max_length=None and cut the rows yourself, or use packing=True"
            )
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise UserError("packing needs max_length, the tokens of a packed row")
        packs = self.packing or bool(self.eval_packing)
        for name, is_read, reason in (
            ("packing_strategy", packs, "no rows are packed"),
            ("truncation_mode", self.max_length is not None and not self.packing, "no rows are cut one by one"),
            ("assistant_only_loss", not self.skips_preparation, _NOT_PREPARED),
            ("completion_only_loss", not self.skips_preparation, _NOT_PREPARED),
            ("shuffle_dataset", not self.skips_preparation, _NOT_PREPARED),
        ):
            if not is_read and (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise UserError(f"{name}={value!r} would have no effect: {reason}; leave it out")

    @property
    def packs_rows(self) -> bool:
        """Whether micro-batches are rows of documents without padding."""
        return self.padding_free or (self.packing and self.packing_strategy != "wrapped")

    @property
    def skips_preparation(self) -> bool:
        """Whether the collator gets the rows as they are."""
        return isinstance(self.dataset_kwargs, dict) and bool(self.dataset_kwargs.get("skip_prepare_dataset"))

    @property
    def token_loss(self) -> TokenLoss:
        return replace(super().token_loss, is_dynamic=self.loss_type == "dft")

    def make_loss(self) -> TokenLoss:
        """The loss that these arguments ask for, which notes its metrics."""
        return replace(self.token_loss, metrics=TokenMetrics())


class PipelineSFTTrainer(TaskTrainer):
    """Fine-tunes on conversations, prompts with completions or texts, with the interface of TRL's SFTTrainer.

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        args: the arguments; None: all defaults.
        data_collator: makes a mini-batch of rows with "input_ids" and "labels"; None: `SFTCollator`.
        train_dataset: rows that `SFTExamples` accepts, map-style or iterable, or its examples. Rows with "image" or
            "images" are those of `ImageTextExamples`.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer, or the processor of a model of images and text. None: the model's own
            tokenizer, if the model is a Hub id or directory, or was loaded from there.
        compute_loss_func: as for `PipelineTrainer`; `entropy` and `mean_token_accuracy` are not logged with it.
        compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as for
            `PipelineTrainer`.
        quantization_config, peft_config: as for `Pipeline`.
        formatting_func: makes a text of each row.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _arguments, examples, _other_columns = PipelineSFTConfig, SFTExamples, ("seq_lengths",)
    args: PipelineSFTConfig

    def __init__(
        self,
        model: Pipeline | ModelSource,
        args: PipelineSFTConfig | None = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
    ) -> None:
        self._formatting = formatting_func
        super().__init__(
            *(model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks),
            *(optimizers, quantization_config, peft_config),
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def _check_loss(self) -> None:
        loss, args = self.pipe.loss, self.args
        if loss.reads_tokens_only and (loss != args.make_loss() or loss.token_loss.metrics is None):
            raise UserError(
                "the given Pipeline has another loss than the arguments ask for; make it with loss=args.make_loss()"
            )
        if not loss.reads_tokens_only and args.loss_type != "nll":
            raise UserError(
                f"loss_type is {args.loss_type!r}, and the loss of the given Pipeline, a {type(loss).__name__}, does "
                "not read it; leave loss_type out"
            )

    def _take_pipeline(self) -> None:
        super()._take_pipeline()
        if self._tokenizer is not None:
            _tell_tokens(self.pipe.adapter.reference, self._tokenizer, self.args)

    def _example(self, spec: ModelSpec) -> Batch | Workload | None:
        return example_of(self.train_dataset, self.args)

    # ------------------------------------------------------------------ the data

    def _prepare_data(self, model: Any) -> None:
        if self.processing_class is None:
            self.processing_class = self._tokenizer_beside(model)
        if self._tokenizer is not None:
            _set_up(self._tokenizer, self.args)
        self._is_completion_only = bool(self.args.completion_only_loss)
        super()._prepare_data(model)

    def _collator(self) -> Collate:
        if self._tokenizer is None:
            return default_collator(None)
        padding = self._tokenizer.pad_token_id
        if isinstance(self.processing_class, ProcessorMixin):
            return ImageTextCollator(padding)
        return SFTCollator(padding, self.args.packs_rows)

    def _examples(self, dataset: Any, name: str | None = None, *, is_training: bool = False) -> Any:
        args = self.args
        packing = args.packing if is_training or args.eval_packing is None else args.eval_packing
        if isinstance(dataset, SFTExamples | ImageTextExamples | EncodedStream | None):
            return dataset
        if is_training and args.completion_only_loss is None:
            self._is_completion_only = {"prompt", "completion"} <= _first_row(dataset).keys()
        if not has_index(dataset) and not args.skips_preparation:
            return self._streamed(dataset, is_training=is_training)
        if self._is_completion_only and self._formatting is not None:
            raise UserError(
                "formatting_func makes texts, which have no completion; set completion_only_loss=False, or leave "
                "formatting_func out"
            )
        form = getattr(dataset, "format", None)
        if not args.skips_preparation and isinstance(form, Mapping) and form.get("type") == "custom":
            raise UserError(
                "the dataset has a transform of Dataset.with_transform(), which may give other rows each time, and the "
                "preparation would read it once; set dataset_kwargs={'skip_prepare_dataset': True} with a transform of "
                "trainer-ready rows, which have token ids, or apply the transform by Dataset.map()"
            )
        if args.skips_preparation:
            if self.data_collator is None or isinstance(self.data_collator, SFTCollator):
                _check_labels(dataset)
            return dataset
        if {"image", "images"} & _first_row(dataset).keys():
            return self._with_images(dataset, packing=packing)
        if self._tokenizer is None:
            raise UserError("processing_class is None; give the tokenizer, or a dataset of SFTExamples")
        rows: Any = (self._formatted(dataset[index]) for index in range(len(dataset)))
        if isinstance(dataset, Block):
            rows = dataset.with_rows(rows)
        return SFTExamples(
            rows,
            self._tokenizer,
            max_length=args.max_length,
            truncation_mode=args.truncation_mode,  # type: ignore[arg-type]  # checked
            assistant_only_loss=args.assistant_only_loss,
            completion_only_loss=self._is_completion_only,
            text_field=args.dataset_text_field if self._formatting is None else "text",
            packing=args.packing_strategy if packing else None,
            shuffle_seed=args.seed if args.shuffle_dataset else None,
        )

    def _with_images(self, rows: Any, *, packing: bool) -> ImageTextExamples:
        """The examples of rows with images."""
        args = self.args
        if not isinstance(self.processing_class, ProcessorMixin):
            raise UserError("the rows have images; give the model's processor as processing_class")
        for name, is_set in (
            ("packing", packing or args.packs_rows),
            ("assistant_only_loss", args.assistant_only_loss),
            ("formatting_func", self._formatting is not None),
            ("truncation_mode 'keep_end'", args.truncation_mode == "keep_end"),
        ):
            if is_set:
                raise UserError(f"{name} is for rows of text alone, and the rows have images; leave it out")
        return ImageTextExamples(
            rows,
            self.processing_class,
            max_length=args.max_length,
            completion_only_loss=self._is_completion_only,
            text_field=args.dataset_text_field,
        )

    def _formatted(self, row: Any) -> Any:
        return row if self._formatting is None or has_ids(row) else {"text": self._formatting(row)}

    # ------------------------------------------------------------------ metrics

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """TRL's metrics since the last call: means over the mini-batches, and the tokens trained on so far."""
        metrics: dict[str, float] = {"num_tokens": self.num_trained_tokens}
        if (noted := self.pipe.loss.token_loss.metrics) is not None:
            metrics |= means(self.world.gather_objects(noted.take(is_training=is_training)))
        return metrics | self._auxiliary_loss(is_training=is_training)


def _check_labels(dataset: Any) -> None:
    """Raise UserError where `SFTCollator` would learn all tokens of rows whose masks choose some of them."""
    columns = _first_row(dataset).keys() | set(getattr(dataset, "column_names", None) or ())
    masks = sorted(columns & {"assistant_masks", "completion_mask"})
    if masks and "labels" not in columns:
        raise UserError(
            f"dataset_kwargs: skip_prepare_dataset=True, and the rows have {masks[0]!r} without 'labels': masks become "
            "labels in the preparation, and without it every token would be learnt. Add a 'labels' column, with "
            f"{IGNORED_LABEL} for tokens that are not learnt, or leave skip_prepare_dataset out"
        )


def _first_row(dataset: Any) -> dict[str, Any]:
    if has_index(dataset):
        return dict(dataset[0]) if len(dataset) else {}
    return dict(next(iter(dataset), {}))


def _set_up(tokenizer: PreTrainedTokenizerBase, args: PipelineSFTConfig) -> None:
    """Give the tokenizer the tokens and the chat template of the arguments."""
    if args.chat_template_path is not None:
        path = Path(args.chat_template_path)
        if not path.is_file():
            raise UserError(f"chat_template_path={args.chat_template_path!r}: there is no such file; correct the path")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    given = {"eos_token": args.eos_token, "pad_token": args.pad_token}
    for name, token in given.items():
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise UserError(f"{name}={token!r} is not a token of {tokenizer.name_or_path!r}; give one of its tokens")
        setattr(tokenizer, name, token)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError("the tokenizer has no padding token and no end-of-sequence token; give pad_token and eos_token")


def _tell_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: PipelineSFTConfig) -> None:
    """Note the tokenizer's tokens in the model's configurations, as TRL does: generation reads them."""
    generation, config = model.generation_config, model.config.get_text_config()
    config.pad_token_id = tokenizer.pad_token_id
    if generation is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    if args.eos_token is None:
        return
    config.eos_token_id = tokenizer.eos_token_id
    if generation is not None:
        ends = generation.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        if tokenizer.eos_token_id not in ends:
            generation.eos_token_id = [tokenizer.eos_token_id, *ends]


class _Conversations(Task):
    """A recipe's conversations are learnt by `PipelineTrainer`, from examples in the form of this task."""

    items, evaluating = "conversations", "predicting the targets in conversations"

    def reader(self, recipe: Recipe) -> Read:
        return conversation_of

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> ChatExamples:
        names = ("max_length", "truncation_mode", "assistant_only_loss", "completion_only_loss")
        return ChatExamples(split, processor, **{name: getattr(recipe.data, name) for name in names})

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        return evaluate_text(pipe, held_out)


TASK = _Conversations()

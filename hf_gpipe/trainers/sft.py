"""`PipelineSFTTrainer`: TRL's SFTTrainer, over a pipeline.

Rows become token ids and labels here (data/examples/sft.py). Stages, tables and the training loop are those of any
other training; the loss notes TRL's metrics beside its value (losses/token_metrics.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import has_ids
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import base_of, has_adapters
from hf_gpipe.data.examples.image_text import ImageTextCollator, ImageTextExamples
from hf_gpipe.data.examples.sft import SFTCollator, SFTExamples
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.libraries.transformers import source_of
from hf_gpipe.losses.token_metrics import means
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.trainers.examples import ExamplesTrainer
from hf_gpipe.trainers.sft_config import PipelineSFTConfig
from hf_gpipe.training.base import default_collator
from hf_gpipe.training.loader import Collate
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.predicting import Preprocess


class PipelineSFTTrainer(ExamplesTrainer):
    """Fine-tunes on conversations, prompts with completions or texts, with the interface of TRL's SFTTrainer.

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        args: the arguments; None: all defaults.
        data_collator: makes a mini-batch of rows with "input_ids" and "labels"; None: `SFTCollator`.
        train_dataset: map-style: rows that `SFTExamples` accepts, or its examples. Rows with "image" or "images" are
            those of `ImageTextExamples`.
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

    _collated_columns = ("seq_lengths",)
    _arguments = PipelineSFTConfig
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
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        args, is_path = self.args, isinstance(model, str | os.PathLike)
        if is_path:
            source = base_of(model) if has_adapters(model) else model
            config = read_config(source, trust_remote_code=args.trusts_model)
        else:
            config = getattr(model, "config", model)
        assert isinstance(config, PreTrainedConfig)
        changes = _auxiliary(config, args)
        new = {name: value for name, value in changes.items() if getattr(config, name, None) != value}
        options = args.model_options(model, new)
        if not is_path:
            # A model has a copy of the coefficient, which its forward reads.
            holders = [config, *(model.modules() if isinstance(model, nn.Module) else ())]
            for name, value in changes.items():
                for holder in (one for one in holders if one is config or name in vars(one)):
                    setattr(holder, name, value)
        return model, options

    def _take_pipeline(self) -> None:
        super()._take_pipeline()
        loss, args = self.pipe.loss, self.args
        if loss.is_of_tokens and (loss != args.make_loss() or loss.of_tokens.metrics is None):
            raise UserError(
                "the given Pipeline has another loss than the arguments ask for; make it with loss=args.make_loss()"
            )
        if not loss.is_of_tokens and args.loss_type != "nll":
            raise UserError(
                f"loss_type is {args.loss_type!r}, and the loss of the given Pipeline, a {type(loss).__name__}, does "
                "not read it; leave loss_type out"
            )
        if self._tokenizer is not None:
            _tell_tokens(self.pipe.adapter.reference, self._tokenizer, self.args)

    # ------------------------------------------------------------------ the data

    def _prepare_data(self, model: Any) -> None:
        if self.processing_class is None:
            self.processing_class = _tokenizer_of(model, self.args)
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

    def _examples(self, dataset: Any, *, is_training: bool = False) -> Any:
        args = self.args
        packing = args.packing if is_training or args.eval_packing is None else args.eval_packing
        if is_training and args.completion_only_loss is None and dataset is not None:
            self._is_completion_only = {"prompt", "completion"} <= _first_row(dataset).keys()
        if self._is_completion_only and self._formatting is not None:
            raise UserError(
                "formatting_func makes texts, which have no completion; set completion_only_loss=False, or leave "
                "formatting_func out"
            )
        if dataset is None or isinstance(dataset, SFTExamples | ImageTextExamples):
            return dataset
        if args.skips_preparation:
            if self.data_collator is None or isinstance(self.data_collator, SFTCollator):
                _check_labels(dataset)
            return dataset
        if not has_index(dataset):
            raise DataError("rows are tokenised before the training, and a stream has no end; give a map-style dataset")
        if {"image", "images"} & _first_row(dataset).keys():
            return self._with_images(dataset, packing=packing)
        if self._tokenizer is None:
            raise UserError("processing_class is None; give the tokenizer, or a dataset of SFTExamples")
        rows = (self._formatted(dataset[index]) for index in range(len(dataset)))
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
        if (noted := self.pipe.loss.of_tokens.metrics) is not None:
            metrics |= means(self.world.gather_objects(noted.take(is_training=is_training)))
        return metrics


def _check_labels(dataset: Any) -> None:
    """Raise UserError where `SFTCollator` would learn all tokens of rows whose masks choose some of them."""
    columns = _first_row(dataset).keys() | set(getattr(dataset, "column_names", None) or ())
    masks = sorted(columns & {"assistant_masks", "completion_mask"})
    if masks and "labels" not in columns:
        raise UserError(
            f"dataset_kwargs: skip_prepare_dataset=True, and the rows have {masks[0]!r} without 'labels': masks become "
            "labels in the preparation, and without it every token would be learnt; give the rows labels, with "
            f"{IGNORED_LABEL} for tokens that are not learnt, or leave skip_prepare_dataset out"
        )


def _first_row(dataset: Any) -> dict[str, Any]:
    return dict(dataset[0]) if has_index(dataset) and len(dataset) else {}


def _tokenizer_of(model: Any, args: PipelineSFTConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hub id or directory, or of the one that a model in memory was loaded from."""
    if not isinstance(model, str | os.PathLike):
        model = source_of(model)
    if not model:
        return None
    return read_tokenizer(model, trust_remote_code=args.trust_remote_code)


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


def _auxiliary(config: PreTrainedConfig, args: PipelineSFTConfig) -> dict[str, Any]:
    """Values of the configuration of a mixture of experts, whose auxiliary loss TRL turns on."""
    coefficient = args.router_aux_loss_coef
    if not hasattr(config, "output_router_logits"):
        if coefficient:
            raise UserError(
                f"router_aux_loss_coef={coefficient!r}: {config.model_type} has no auxiliary loss of experts; leave it "
                "out"
            )
        return {}
    used = getattr(config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return {"output_router_logits": bool(used), "router_aux_loss_coef": used}

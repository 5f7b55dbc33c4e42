"""`PipelineEmbeddingTrainer`: models of embeddings, with the losses and files of sentence-transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters.embedders import as_embedder
from hf_gpipe.checkpoint.peft import base_of, has_adapters
from hf_gpipe.checkpoint.sentence_files import SentenceFiles
from hf_gpipe.data.examples.embeddings import EmbeddingCollator, EmbeddingExamples
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers import source_of
from hf_gpipe.losses.embedding import EmbeddingLoss
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.settings.losses import EmbeddingsSection
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.trainers.own_loss import OwnLossArguments, OwnLossTrainer, as_class
from hf_gpipe.training.arguments import argument, key_of


@dataclass
class PipelineEmbeddingConfig(OwnLossArguments):
    """Arguments of `PipelineEmbeddingTrainer`: those of `PipelineTrainer`, and of sentence-transformers' losses.

    `per_device_train_batch_size` is the examples of a mini-batch, of `texts` rows each.

    Raises:
        UserError: an argument that is not supported.
    """

    max_length: int | str | None = argument(  # type: ignore[assignment]  # a text until the model is known
        AUTO, "Tokens of a text at most; None: any number; auto: as files of sentence-transformers say, or 512."
    )
    disable_dropout: bool = key_of(EmbeddingsSection, "disable_dropout")
    loss_type: str = key_of(EmbeddingsSection, "loss_type")
    pooling: str = key_of(EmbeddingsSection, "pooling")
    texts: int | None = key_of(EmbeddingsSection, "texts")
    scale: float = key_of(EmbeddingsSection, "scale")
    margin: float = key_of(EmbeddingsSection, "margin")
    distance: str = key_of(EmbeddingsSection, "distance")
    matryoshka_dims: list[int] | None = key_of(EmbeddingsSection, "matryoshka_dims")
    matryoshka_weights: list[float] | None = key_of(EmbeddingsSection, "matryoshka_weights")
    normalizes: bool | None = argument(
        None, "Whether embeddings are divided by their length; None: as files of sentence-transformers say, or not."
    )
    _loss = EmbeddingLoss


class PipelineEmbeddingTrainer(OwnLossTrainer):
    """Trains a model of embeddings by pipeline parallelism; the negatives are those of the whole mini-batch.

    Every process makes the same trainer and calls the same methods; only the main process reads data. The saved
    directory loads in sentence-transformers.

    Args:
        model: the Hub id or directory of an encoder (bert, xlm-roberta, ...) or a decoder-only model, whose head is
            left out, or of PEFT adapters; its configuration; a model in memory of AutoModel; or a Pipeline made with
            `args.make_loss()` as its loss.
        data_collator: rows to a mini-batch; None: `EmbeddingCollator`.
        train_dataset, eval_dataset: rows that `EmbeddingExamples` takes, or its examples.
        args, processing_class, compute_metrics, callbacks, optimizers, quantization_config, peft_config: as for
            `PipelineDPOTrainer`.

    Raises:
        UserError: what is not supported, by name.
    """

    _arguments, _class_of_examples = PipelineEmbeddingConfig, EmbeddingExamples
    args: PipelineEmbeddingConfig

    def _prepare_data(self, model: Any) -> None:
        self._files, args = files_of(model), self.args
        own = model.loss if isinstance(model, Pipeline) and isinstance(model.loss, EmbeddingLoss) else self._files
        if args.pooling == AUTO and own.pooling is not None:
            args.pooling = own.pooling
        if args.normalizes is None:
            args.normalizes = own.normalizes
        if args.max_length == AUTO:
            args.max_length = self._files.max_length or _MAX_LENGTH
        if self._files.lowers_case:
            if self.processing_class is None and isinstance(model, str):
                self.processing_class = read_tokenizer(model)
            if self._tokenizer is not None:
                lower_case(self._tokenizer)
        super()._prepare_data(model)

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        return as_class(model, lambda config, is_saved: dict(as_embedder(config)))

    def _take_pipeline(self) -> None:
        super()._take_pipeline()
        if (adapter := self.pipe.adapter).has_head:
            raise UserError(
                f"the model is a {type(adapter.reference).__name__}, which has a head; give its path, or a model of "
                "AutoModel"
            )

    def _collator(self) -> EmbeddingCollator:
        loss = self.args.make_loss()
        return EmbeddingCollator(self._padding, loss.texts, loss.loss_type == "cosine")

    def _write_beside_model(self, folder: Path) -> None:
        super()._write_beside_model(folder)
        loss, width = self.pipe.loss, self.pipe.adapter.config.get_text_config().hidden_size
        assert isinstance(loss, EmbeddingLoss)
        how: dict[str, Any] = {"max_length": self.args.max_length, "normalizes": loss.normalizes}
        self._files.write(folder, width=width, pooling=loss.pooling, **how)


#: Tokens of a text at most, where nothing says it.
_MAX_LENGTH = 512


def files_of(model: Any) -> SentenceFiles:
    """The files of sentence-transformers beside a model: a path, a model or configuration read from one, or a Pipeline.

    Raises UserError for files of a model that is not supported.
    """
    if isinstance(model, Pipeline):
        model = model.adapter.reference
    if not isinstance(model, str | os.PathLike):
        model = source_of(model)
        model = model if os.path.isdir(model) else None  # an id may be another model's by now
    return SentenceFiles.of(base_of(model) if has_adapters(model) else model)


def lower_case(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer lowercase its texts first, as sentence-transformers does it. Raises UserError if it cannot."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise UserError("do_lower_case of sentence_bert_config.json needs a fast tokenizer; lowercase the texts")
    if "Lowercase" not in repr(backend.normalizer) and "lowercase=True" not in repr(backend.normalizer):
        others = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])

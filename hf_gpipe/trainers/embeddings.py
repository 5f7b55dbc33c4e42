"""`PipelineEmbeddingTrainer`: models of embeddings, with the losses and files of sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_gpipe.adapters.embedders import as_embedder
from hf_gpipe.data.examples.embeddings import EmbeddingCollator, EmbeddingExamples
from hf_gpipe.errors import UserError
from hf_gpipe.losses.embedding import EmbeddingLoss
from hf_gpipe.recipe.losses import EmbeddingsSection
from hf_gpipe.trainers.own_loss import OwnLossArguments, OwnLossTrainer, as_class
from hf_gpipe.training.arguments import argument, key_of

#: sentence-transformers' names of the parts of a model, and of the fields of a pooling.
_MODULES = ("Transformer", "Pooling")
_POOLING_FIELDS = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}


@dataclass
class PipelineEmbeddingConfig(OwnLossArguments):
    """Arguments of `PipelineEmbeddingTrainer`: those of `PipelineTrainer`, and of sentence-transformers' losses.

    `per_device_train_batch_size` is the examples of a mini-batch, of `texts` rows each.

    Raises:
        UserError: an argument that is not supported.
    """

    max_length: int | None = argument(512, "Tokens of a text at most; None: any number.")
    disable_dropout: bool = key_of(EmbeddingsSection, "disable_dropout")
    loss_type: str = key_of(EmbeddingsSection, "loss_type")
    pooling: str = key_of(EmbeddingsSection, "pooling")
    texts: int | None = key_of(EmbeddingsSection, "texts")
    scale: float = key_of(EmbeddingsSection, "scale")
    margin: float = key_of(EmbeddingsSection, "margin")
    distance: str = key_of(EmbeddingsSection, "distance")
    matryoshka_dims: list[int] | None = key_of(EmbeddingsSection, "matryoshka_dims")
    matryoshka_weights: list[float] | None = key_of(EmbeddingsSection, "matryoshka_weights")
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
        # The files by which sentence-transformers knows the parts of the model.
        assert isinstance(self.pipe.loss, EmbeddingLoss)
        width, pooling = self.pipe.adapter.config.get_text_config().hidden_size, self.pipe.loss.pooling
        fields = {f"pooling_mode_{field}": name == pooling for name, field in _POOLING_FIELDS.items()}
        modules = [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{name}" if number else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for number, name in enumerate(_MODULES)
        ]
        contents: dict[str, Any] = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": self.args.max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
            "1_Pooling/config.json": {"word_embedding_dimension": width, **fields},
        }
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

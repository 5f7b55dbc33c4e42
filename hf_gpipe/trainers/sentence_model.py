"""A pipeline's model of embeddings with the methods of SentenceTransformer that its evaluators call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.errors import MissingAttributeError, UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.predicting import shared_batches


class SentenceModel:
    """The model that an evaluator of sentence-transformers gets. Every process calls its methods alike.

    Args:
        pipe: the pipeline, whose loss is an EmbeddingLoss.
        tokenizer: in the main process.
        max_length: tokens to which a text is cut; None: any number.
        settings: what config_sentence_transformers.json has: the prompts by name, the name of the usual one, and the
            name of the function that compares two embeddings.
    """

    def __init__(
        self,
        pipe: Pipeline,
        tokenizer: Any,
        max_length: int | None,
        settings: Mapping[str, Any],
    ) -> None:
        self._pipe, self._max_length, self.tokenizer = pipe, max_length, tokenizer
        # As in sentence-transformers, the usual prompt does not stand before queries and documents without one.
        self.prompts: dict[str, str] = {"query": "", "document": "", **(settings.get("prompts") or {})}
        self.default_prompt_name: str | None = settings.get("default_prompt_name")
        self.similarity_fn_name: str = settings.get("similarity_fn_name") or "cosine"
        self.device = pipe.world.device
        #: An evaluator writes its metrics into the card of the model; the trainer logs them.
        self.model_card_data = SimpleNamespace(set_evaluation_metrics=lambda *args, **kwargs: None)

    def __getattr__(self, name: str) -> Any:
        raise MissingAttributeError(
            f"an evaluator asks the model for {name!r}; during a pipeline's training it has encode, encode_query, "
            "encode_document and similarity: use another evaluator, or evaluate the saved model"
        )

    def eval(self) -> SentenceModel:
        """Return the model, which encodes without dropout in any case."""
        return self

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """The similarity of each of some embeddings (N, D) with each of others (M, D), (N, M)."""
        from sentence_transformers.util import SimilarityFunction  # type: ignore[import-not-found]

        similarity: torch.Tensor = SimilarityFunction.to_similarity_fn(self.similarity_fn_name)(first, second)
        return similarity

    def encode_query(self, inputs: Any, prompt_name: str | None = None, **options: Any) -> Any:
        """`encode` with the model's prompt of queries, if it has one."""
        return self._encode_as(("query",), inputs, prompt_name, **options)

    def encode_document(self, inputs: Any, prompt_name: str | None = None, **options: Any) -> Any:
        """`encode` with the model's prompt of documents, if it has one."""
        return self._encode_as(("document", "passage", "corpus"), inputs, prompt_name, **options)

    def _encode_as(self, names: Sequence[str], inputs: Any, prompt_name: str | None, **options: Any) -> Any:
        if prompt_name is None and options.get("prompt") is None:
            prompt_name = next((name for name in names if name in self.prompts), None)
        return self.encode(inputs, prompt_name, **options)

    def encode(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        precision: str | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        **options: Any,
    ) -> Any:
        """The embeddings of texts, (N, D) in float32, or (D,) of one text; the same in every process.

        Args:
            inputs: the texts.
            prompt_name: the name of the prompt that goes before each text; None: the usual one, if the model has it.
            prompt: the prompt itself.
            batch_size: texts of a mini-batch.
            show_progress_bar: without effect.
            precision: None or "float32".
            convert_to_numpy, convert_to_tensor: whether to return an array, or else a list of tensors, or one tensor.
            normalize_embeddings: whether embeddings are divided by their length.
            truncate_dim: the number of entries to which embeddings are cut, before they are normalised.
            options: others of SentenceTransformer's method, which must be None.

        Raises:
            UserError: an option that is not supported.
        """
        others = {**options, "precision": None if precision == "float32" else precision}
        if unknown := [name for name, value in others.items() if value is not None]:
            raise UserError(f"encode: {unknown[0]} is not supported during a pipeline's training; leave it out")
        prompt_name = prompt_name or self.default_prompt_name
        if prompt is None and prompt_name is not None:
            if prompt_name not in self.prompts:
                raise UserError(f"encode: the model has no prompt {prompt_name!r}; it has {', '.join(self.prompts)}")
            prompt = self.prompts[prompt_name]
        texts = [(prompt or "") + text for text in ([inputs] if isinstance(inputs, str) else inputs)]
        found = self._embedded(texts, batch_size)[:, :truncate_dim]
        if normalize_embeddings:
            found = F.normalize(found, dim=1)
        given = found[0] if isinstance(inputs, str) else found
        if convert_to_tensor:
            return given
        return given.numpy() if convert_to_numpy or isinstance(inputs, str) else list(given)

    def _embedded(self, texts: Sequence[str], batch_size: int) -> torch.Tensor:
        """The embeddings of texts, (N, D); texts of similar length share a mini-batch."""
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        # The runtime cuts no example apart, so there are as many rows as whole examples have.
        unit = self._pipe.loss.rows_per_unit
        order += order[-1:] * (-len(order) % unit)
        batches = self._batches([texts[number] for number in order], -(-batch_size // unit) * unit)
        with self._pipe.ties.holding_values():
            parts = [self._pipe.embed(batch) for batch in shared_batches(batches, self._pipe.world)]
        if not parts:
            return torch.zeros(0, self._pipe.adapter.config.get_text_config().hidden_size)
        return torch.cat(parts)[torch.tensor(order[: len(texts)]).argsort()].float()

    def _batches(self, texts: Sequence[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        """The mini-batches of texts; the main process alone iterates over them."""
        for start in range(0, len(texts), size):
            cut = {"truncation": True, "max_length": self._max_length} if self._max_length is not None else {}
            rows = token_ids(self.tokenizer(list(texts[start : start + size]), **cut))
            yield PairCollator(0).of_ids(rows) | {"labels": torch.zeros(len(rows))}

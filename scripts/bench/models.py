"""The models and rows that the benchmarks are made of."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig, LlamaConfig


def llama(hidden: int, layers: int, vocabulary: int, intermediate: int | None = None, **values: Any) -> LlamaConfig:
    """A Llama with heads of width 64 and, unless `values` say so, without ties; feed-forward layers 4 times as wide."""
    heads = values.pop("heads", max(1, hidden // 64))
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **{"num_key_value_heads": heads, "tie_word_embeddings": False, **values},
    )


def random_ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """Tokens (B, T) without the special ones."""
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def random_batch(rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """The same as a mini-batch without padding."""
    ids = random_ids(rows, length, vocabulary)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def random_rows(rows: int, length: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """The same as a data set."""
    return [{"input_ids": ids, "labels": ids} for ids in random_ids(rows, length, vocabulary).tolist()]


def quantisation(kind: str, compute_dtype: str = "bfloat16") -> BitsAndBytesConfig:
    """nf4, fp4 (with a + for double quantisation) or int8."""
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind.removesuffix("+"),
        bnb_4bit_use_double_quant=kind.endswith("+"),
        bnb_4bit_compute_dtype=compute_dtype,
    )

"""Tiny models, mini-batches and data of frozen runs. They depend on nothing that a change of the code may change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    M2M100Config,
    MarianConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    T5Config,
    TrainerCallback,
)

VOCABULARY = 50
Batch = dict[str, torch.Tensor]

_IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
_DECODER: dict[str, Any] = {
    **_IDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}
_BART: dict[str, Any] = {
    **_IDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _DECODER),
    "gemma2": (Gemma2Config, {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
    "mixtral": (MixtralConfig, {**_DECODER, "num_local_experts": 4, **_EXPERTS}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            **_DECODER,
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
            **_EXPERTS,
        },
    ),
    "gpt2": (GPT2Config, {**_IDS, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64}),
    "marian": (MarianConfig, _BART),
    "m2m_100": (M2M100Config, _BART),
    "bart": (BartConfig, _BART),
    "t5": (T5Config, _T5),
    "bert": (
        BertConfig,
        {**_DECODER, "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
_DROPOUT = {
    "llama": ("attention_dropout",),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "t5": ("dropout_rate",),
    **dict.fromkeys(("marian", "m2m_100", "bart"), ("dropout", "attention_dropout", "activation_dropout")),
}


def config_of(family: str, *, tied: bool = False, dropout: float = 0.0, **changes: Any) -> PreTrainedConfig:
    """The configuration of a model with a few thousand parameters."""
    made, values = _FAMILIES[family]
    rates = dict.fromkeys(_DROPOUT.get(family, ()), dropout)
    return made(**{**values, "tie_word_embeddings": tied, **rates, **changes})


def model_of(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model with random weights that are far enough from 0 for every part to matter; those of T5 are so anyway."""
    torch.manual_seed(seed)
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if config.model_type == "bert":
        auto = AutoModel
    if hasattr(config, "router_aux_loss_coef"):
        config._experts_implementation = "eager"  # the other ways multiply no matrices of float64
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and config.model_type != "t5":
                parameter.mul_(4.0)
    made: PreTrainedModel = model.to(dtype).train()
    return made


def batch_of(config: PreTrainedConfig, rows: int = 8, seed: int = 0) -> Batch:
    """Rows of unequal length, padded on the right; labels are -100 where there is no target."""
    generator = torch.Generator().manual_seed(seed)
    source, target = 6 + rows, 5 + rows
    ids = torch.randint(3, VOCABULARY, (rows, source), generator=generator)
    labels = torch.randint(3, VOCABULARY, (rows, target), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, source - row :] = 0
        labels[row, target - row :] = -100
    ids = ids.masked_fill(mask == 0, 0)
    if not config.is_encoder_decoder:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of unequal lengths, of a decoder-only model or of an encoder-decoder whose target repeats the source."""

    def __init__(self, count: int = 24, *, is_causal: bool = True, seed: int = 0) -> None:
        dice = random.Random(seed)
        self._is_causal = is_causal
        self._rows = [[dice.randrange(3, VOCABULARY) for _ in range(dice.randrange(3, 12))] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._rows[index]
        return {"input_ids": ids, "labels": list(ids) if self._is_causal else [*ids, 1]}


class Logs(TrainerCallback):
    """Keeps what a trainer logs."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.lines.append(dict(logs))


LETTERS = "abcdefghijklmnopqrstuvwxyz .:,?"


def tokenizer(special: Sequence[str] = ("<pad>", "</s>", "<s>", "<unk>")) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with some words, made of a list and not trained, so that it never changes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    merges = []
    for word in ("th", "the", "Ġa", "in", "er", "an", "Ġth", "Ġthe", "ing", "on"):
        pair = (word[:-1], word[-1])
        if word == "ing":
            pair = ("in", "g")
        if word == "Ġthe":
            pair = ("Ġth", "e")
        merges.append(pair)
        vocabulary[word] = len(vocabulary)
    # The parts of a merge come before it.
    merges.insert(6, ("Ġ", "t"))
    vocabulary["Ġt"] = len(vocabulary)
    merges[7] = ("Ġt", "h")
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def text_of(dice: random.Random, most: int = 9) -> str:
    """A short text, which begins with a letter."""
    return dice.choice(LETTERS[:26]) + "".join(dice.choices(LETTERS, k=dice.randrange(1, most)))


def preferences(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts with a chosen and a rejected answer."""
    dice = random.Random(seed)
    return [{"prompt": f"{text_of(dice)}:", "chosen": text_of(dice), "rejected": text_of(dice)} for _ in range(count)]


def prompts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts of equally many tokens with the answer that is wanted: eager attention makes NaN of columns of padding
    before a float64 row."""
    dice = random.Random(seed)
    return [{"prompt": f"{''.join(dice.choices('bdfjkm', k=5))}:", "answer": text_of(dice)} for _ in range(count)]

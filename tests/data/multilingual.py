"""Tiny tokenizers of the families that have codes of languages, made here, and models of theirs."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    PLBartConfig,
    PLBartForConditionalGeneration,
    PLBartTokenizer,
)

#: Codes of German, English and French, or of what the family calls languages.
CODES = {
    "nllb": {"de": "deu_Latn", "en": "eng_Latn", "fr": "fra_Latn"},
    "m2m_100": {"de": "de", "en": "en", "fr": "fr"},
    "mbart": {"de": "de_DE", "en": "en_XX", "fr": "fr_XX"},
    "mbart50": {"de": "de_DE", "en": "en_XX", "fr": "fr_XX"},
    "plbart": {"de": "java", "en": "en_XX", "fr": "python"},
}
_CHARACTERS = ["▁", *string.ascii_letters, *string.digits, *".<>_ "]
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_MODELS = {
    "nllb": (M2M100Config, M2M100ForConditionalGeneration),
    "m2m_100": (M2M100Config, M2M100ForConditionalGeneration),
    "mbart": (MBartConfig, MBartForConditionalGeneration),
    "mbart50": (MBartConfig, MBartForConditionalGeneration),
    "plbart": (PLBartConfig, PLBartForConditionalGeneration),
}


def tokenizer(family: str, folder: Path) -> Any:
    """A tokenizer of characters."""
    vocabulary = dict.fromkeys([*_SPECIAL, *_CHARACTERS])
    ids = {token: number for number, token in enumerate(vocabulary)}
    if family == "nllb":
        return NllbTokenizer(vocab=ids, merges=[], extra_special_tokens=[*CODES["nllb"].values(), "kor_Hang"])
    if family == "mbart":
        codes = MBartTokenizer().lang_code_to_id
        return MBartTokenizer(vocab=[(token, 0.0) for token in [*ids, *codes, "<mask>"]])
    if family == "mbart50":
        codes = MBart50Tokenizer().lang_code_to_id
        return MBart50Tokenizer(vocab=[(token, 0.0) for token in [*ids, *codes, "<mask>"]])
    (folder / "texts").write_text("\n".join(f"{letter} {letter}" for letter in "".join(_CHARACTERS[1:-5])))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts"), model_prefix=str(folder / "spm"), model_type="char", vocab_size=67, minloglevel=2
    )
    if family == "plbart":
        return PLBartTokenizer(str(folder / "spm.model"), language_codes="multi")
    (folder / "vocab.json").write_text(json.dumps(ids))
    return M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "spm.model"))


def model(family: str, of: Any) -> Any:
    """A plain model with random weights, in float64."""
    config_class, model_class = _MODELS[family]
    sizes: dict[str, Any] = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIZES.items()}
    config = config_class(
        vocab_size=max(len(of), 1 + max(of.get_vocab().values()), 180 if family == "m2m_100" else 0),
        d_model=16,
        dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        eos_token_id=of.eos_token_id,
        pad_token_id=of.pad_token_id,
        bos_token_id=of.bos_token_id,
        forced_eos_token_id=None,
        init_std=0.5,
        **sizes,
    )
    torch.manual_seed(0)
    return model_class(config).double().eval()


_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 16, "layerdrop": 0.0}

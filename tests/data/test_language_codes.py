"""Tokenizers with codes of languages: rows, losses and translations are those of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.commands import generate
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.recipe.fields import EvaluationSection
from hf_gpipe.tasks.translation.evaluate import evaluate_translation
from hf_gpipe.tasks.translation.fields import PairFields
from hf_gpipe.tasks.translation.pairs import Pair
from hf_gpipe.tasks.translation.tokenized import TokenizedPairs
from tests.data.multilingual import CODES, model, tokenizer

FAMILIES = list(CODES)
DATA: dict[str, Any] = {"kind": "jsonl", "path": "x", "language_field": "l", "english": "target", "direction": "both"}


def pairs() -> list[Pair]:
    """Both directions of rows of two languages, with tags, as a recipe reads them."""
    fields = PairFields(DataSection(**DATA))
    rows = [
        {"l": "de", "source": "drei Tage", "target": "three days"},
        {"l": "fr", "source": "trois jours", "target": "three days"},
        {"l": "de", "source": "Mai", "target": "May"},
    ]
    return [pair for row in rows for pair in fields.pairs("row", row, None, tags=fields.has_tags(["de", "fr"]))]


def encoded(family: str, of: Any, **options: Any) -> TokenizedPairs:
    limits: dict[str, Any] = {"max_source_tokens": 32, "max_target_tokens": 32}
    return TokenizedPairs(pairs(), of, **limits | {"language_codes": CODES[family]} | options)


def by_transformers(family: str, of: Any) -> list[Any]:
    """Each row by the tokenizer alone, with src_lang, tgt_lang and text_target."""
    found = []
    for pair in pairs():
        of.src_lang, of.tgt_lang = (CODES[family][code] for code in (pair.source_language, pair.target_language))
        source = pair.source.split("> ", 1)[1]
        found.append(of(source, text_target=pair.target))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_loss_and_translations_are_the_plain_ones(family: str, tmp_path: Path) -> None:
    """Each target began with eng_Latn and each source with a tag as text; M2M-100 ended in KeyError: None."""
    of = tokenizer(family, tmp_path)
    before = of.src_lang, of.tgt_lang
    rows = encoded(family, of)
    assert (of.src_lang, of.tgt_lang) == before
    wanted = by_transformers(family, tokenizer(family, tmp_path))
    assert [(row["input_ids"], row["labels"]) for row in rows] == [(row.input_ids, row.labels) for row in wanted]

    plain = model(family, of)
    batch = PairCollator.for_tokenizer(of)(list(rows))
    pipe = Pipeline(plain, 2, 2)
    assert float(pipe.eval_step(batch).loss) == pytest.approx(float(plain(**batch).loss), rel=1e-10)

    evaluation = EvaluationSection(batch_size=4, max_new_tokens=8)
    report = evaluate_translation(pipe, of, pairs(), lambda some, its: rows, evaluation)
    for pair, row, translated in zip(pairs(), wanted, report.translations, strict=True):
        token = of.convert_tokens_to_ids(_token(family, CODES[family][pair.target_language]))
        name = "decoder_start_token_id" if family in ("mbart", "plbart") else "forced_bos_token_id"
        inputs = {"input_ids": torch.tensor([row.input_ids]), name: token}
        (ids,) = plain.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert token in ids[:2]
        # Those of M2M-100 are special only in a tokenizer that was saved so.
        languages = {token, *getattr(of, "lang_code_to_id", {}).values()}
        text = of.decode([one for one in ids.tolist() if one not in languages], skip_special_tokens=True)
        assert translated.translation == text.strip()
    assert len({one.translation for one in report.translations}) > 1


def _token(family: str, code: str) -> str:
    return f"__{code}__" if family in ("m2m_100", "plbart") else code


def test_what_is_cut_and_what_is_unknown(tmp_path: Path) -> None:
    of = tokenizer("nllb", tmp_path)
    cut = encoded("nllb", of, max_target_tokens=4)
    of.tgt_lang = "deu_Latn"
    assert cut[1]["labels"] == of(text_target="drei Tage", truncation=True, max_length=4).input_ids
    assert cut.num_truncated_targets == 6
    assert cut.num_characters[0] == len(of.decode(cut[0]["labels"], skip_special_tokens=True)) == 1
    with pytest.raises(DataError, match=r"no language 'de'; give its code, as {de: deu_Latn}; codes near it are deu_L"):
        encoded("nllb", of, language_codes={"en": "eng_Latn"})
    unnamed = [Pair("a", "b", "all", "a")]
    with pytest.raises(DataError, match=r"the data do not say which languages the sides have; set data\.english"):
        TokenizedPairs(unnamed, of, max_source_tokens=8, max_target_tokens=8)
    with pytest.raises(DataError, match=r"language_codes\.de is 3 .*; give the tokenizer's code"):
        DataSection(**DATA, language_codes={"de": 3})


def test_the_command_translates_between_languages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There was no way to say the language of a text and of its translation."""
    of = tokenizer("nllb", tmp_path)
    plain = model("nllb", of)
    for saved in (of, plain):
        saved.save_pretrained(tmp_path / "model")
    options = ["--source-language", "fra_Latn", "--target-language", "deu_Latn", "--max-new-tokens", "6"]
    generate.main([str(tmp_path / "model"), "jours", "--num-stages", "2", "--device", "cpu", *options])
    of.src_lang = "fra_Latn"
    start = of.convert_tokens_to_ids("deu_Latn")
    ids = plain.generate(**of("jours", return_tensors="pt"), forced_bos_token_id=start, max_new_tokens=6)
    assert capsys.readouterr().out == f"{of.decode(ids[0], skip_special_tokens=True)}\n"

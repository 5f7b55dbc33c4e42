"""Pairs from a file: what is read, what is refused and how the refusal reads."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError
from tests.data import sections


def jsonl_corpus(*, path: Path, **options) -> Corpus:
    return sections.corpus(kind="jsonl", path=str(path), **options)


def write(path: Path, lines: list[str]) -> Path:
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def rows(count: int) -> list[str]:
    languages = ["de", "fr", "ru"]
    return [
        json.dumps({"en": f"sentence {number // 3}", "xx": f"Satz {number}", "lang": languages[number % 3]})
        for number in range(count)
    ]


FIELDS = {"source_field": "en", "target_field": "xx"}


def everything(corpus: Corpus) -> list[tuple[str, str, str]]:
    found = [(pair.source, pair.target, pair.language) for pair in (*corpus.train, *corpus.validation, *corpus.test)]
    return sorted(found)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_every_line_is_a_pair(tmp_path, name):
    corpus = jsonl_corpus(path=write(tmp_path / name, [*rows(9), "", "  "]), language_field="lang", **FIELDS)
    assert len(everything(corpus)) == 9
    assert ("sentence 2", "Satz 7", "fr") in everything(corpus)
    assert corpus.languages == ["de", "fr", "ru"]
    assert corpus.target_tags == []


def test_recurring_sentences_stay_in_one_split(tmp_path):
    path = write(tmp_path / "pairs.jsonl", rows(300))
    corpus = jsonl_corpus(path=path, validation_fraction=0.2, test_fraction=0.2, split_by="source", **FIELDS)
    train, held_out = ({pair.source for pair in part} for part in (corpus.train, [*corpus.validation, *corpus.test]))
    assert train
    assert held_out
    assert not train & held_out
    assert all(pair.split_key == pair.source for pair in corpus.train)
    by_target = jsonl_corpus(path=path, split_by="target", **FIELDS)
    assert all(pair.split_key == pair.target for pair in by_target.train)


def test_tags_name_the_language_and_do_not_move_the_split(tmp_path):
    path = write(tmp_path / "pairs.jsonl", rows(60))
    plain = jsonl_corpus(path=path, language_field="lang", **FIELDS)
    with_tag = jsonl_corpus(path=path, language_field="lang", target_tag=True, **FIELDS)
    assert with_tag.target_tags == ["<2de>", "<2fr>", "<2ru>"]
    assert [f"<2{pair.language}> {pair.source}" for pair in plain.test] == [pair.source for pair in with_tag.test]


def test_languages_select_and_order(tmp_path):
    path = write(tmp_path / "pairs.jsonl", rows(30))
    corpus = jsonl_corpus(path=path, language_field="lang", languages=["ru", "de"], target_tag=True, **FIELDS)
    assert corpus.languages == ["ru", "de"]
    assert corpus.target_tags == ["<2ru>", "<2de>"]
    assert {language for _, _, language in everything(corpus)} == {"ru", "de"}


def test_max_examples_draws_by_the_seed(tmp_path):
    path = write(tmp_path / "pairs.jsonl", rows(200))
    drawn = [everything(jsonl_corpus(path=path, max_examples=50, seed=seed, **FIELDS)) for seed in (0, 0, 1)]
    assert [len(found) for found in drawn] == [50, 50, 50]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(everything(jsonl_corpus(path=path, max_examples=1000, **FIELDS))) == 200


def test_without_a_language_field_there_is_one_language(tmp_path):
    assert jsonl_corpus(path=write(tmp_path / "pairs.jsonl", rows(9)), **FIELDS).languages == ["all"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"en": "a", "yy": "b"}',
            r"pairs\.jsonl, line 3: no field 'xx'; the fields found are en, yy",
        ),
        ('{"xxx": "b", "en": "a"}', r"line 3: no field 'xx'; did you mean 'xxx'\?; the fields found are xxx, en"),
        ("{}", "line 3: no field 'en'; the fields found are none"),
        ('{"en": "a", "xx": 3}', "line 3: field 'xx' is 3; it must be text"),
        ('{"en": " ", "xx": "b"}', "line 3: field 'en' is ' '; it must be text that is not empty"),
        ('{"en": "a", ', r"line 3 is not JSON \(.* at column 12\)"),
        ('["a", "b"]', "line 3 is a JSON list; write an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "pairs.jsonl", [*rows(2), line])
    with pytest.raises(DataError, match=message):
        jsonl_corpus(path=path, **FIELDS)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        jsonl_corpus(path=tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        jsonl_corpus(path=tmp_path)
    with pytest.raises(DataError, match="has no pairs"):
        jsonl_corpus(path=write(tmp_path / "empty.jsonl", []))
    (tmp_path / "latin.jsonl").write_bytes('{"source": "Grüße"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        jsonl_corpus(path=tmp_path / "latin.jsonl")
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    with pytest.raises(DataError, match=r"plain\.jsonl\.gz cannot be read"):
        jsonl_corpus(path=tmp_path / "plain.jsonl.gz")
    whole = write(tmp_path / "cut.jsonl.gz", rows(500)).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz cannot be read"):
        jsonl_corpus(path=tmp_path / "cut.jsonl.gz", **FIELDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_tag": True}, "target_tag needs to know"),
        ({"languages": ["de"]}, "languages needs to know"),
        ({"language_field": "lang", "languages": ["es"]}, "no pairs in 'es'; it has de, fr, ru"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(tmp_path, options, message):
    path = write(tmp_path / "pairs.jsonl", rows(9))
    with pytest.raises(DataError, match=message):
        jsonl_corpus(path=path, **FIELDS, **options)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "bom.jsonl").write_text("\ufeff" + "\n".join(rows(3)), encoding="utf-8")
    assert len(everything(jsonl_corpus(path=tmp_path / "bom.jsonl", **FIELDS))) == 3


# A corpus beside the checkout; where there is none, the test is skipped.
TLDR = Path(os.environ.get("HF_GPIPE_TLDR", Path(__file__).parents[2] / "../shared/data/tldr/tldr.jsonl.gz"))


@pytest.mark.skipif(not TLDR.exists(), reason=f"there is no {TLDR}; HF_GPIPE_TLDR names the file")
def test_real_text_with_recurring_english():
    corpus = jsonl_corpus(
        path=TLDR, source_field="src", target_field="tgt", language_field="tgt_lang", split_by="source", target_tag=True
    )
    assert len(everything(corpus)) == 91_587
    assert len(corpus.languages) == 38
    train = {pair.split_key for pair in corpus.train}
    assert not train & {pair.split_key for pair in corpus.test}
    assert len(corpus.test) == pytest.approx(0.05 * 91_587, rel=0.1)

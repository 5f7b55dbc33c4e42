"""Data sets of the Hub's form: subsets of a language pair each, with or without splits of their own."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hf_gpipe.data.hub import _opener
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError
from tests.data import hub_directories
from tests.data.sections import corpus as build_corpus

# As OPUS-100: the languages of a pair in the order of the alphabet, and one that has training rows only.
OPUS = {
    "af-en": {"train": 90, "validation": 8, "test": 9},
    "en-zh": {"train": 120, "validation": 7, "test": 6},
    "en-yo": {"train": 150},
}
FIELDS = {"source_field": "translation.{language}", "target_field": "translation.en"}
SUBSETS = ["{language}-en", "en-{language}"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def opus(tmp_path):
    return hub_directories.write(tmp_path / "opus", OPUS, shards=3)


def hub_corpus(path, **options) -> Corpus:
    defaults = {"subset": SUBSETS, "languages": ["zh", "af", "yo"], **FIELDS}
    return build_corpus(kind="hub", path=str(path), **{**defaults, **options})


def of_split(corpus: Corpus, split: str) -> Counter[str]:
    return Counter(pair.language for pair in getattr(corpus, split))


def test_own_splits_are_kept_and_others_made_by_hash(opus):
    corpus = hub_corpus(opus, validation_fraction=0.1, test_fraction=0.2)
    assert corpus.languages == ["zh", "af", "yo"]
    assert corpus.target_tags == []
    train, validation, test = (of_split(corpus, split) for split in ("train", "validation", "test"))
    assert (train["zh"], train["af"]) == (120, 90)
    assert (validation["zh"], validation["af"], test["zh"], test["af"]) == (7, 8, 6, 9)
    assert train["yo"] + validation["yo"] + test["yo"] == 150
    assert 5 <= validation["yo"] <= 30 <= test["yo"] + 15
    assert ("zh of en-zh, test 5", "en of en-zh, test 5") in [(pair.source, pair.target) for pair in corpus.test]
    assert all("train" in pair.source for pair in corpus.train)


def test_a_stream_has_the_same_pairs(opus):
    options = {"validation_fraction": 0.1, "test_fraction": 0.1, "direction": "both"}
    whole, stream = hub_corpus(opus, **options), hub_corpus(opus, streaming=True, **options)
    assert (stream.validation, stream.test) == (whole.validation, whole.test)
    assert (stream.languages, stream.target_tags) == (whole.languages, whole.target_tags)
    assert stream.train.counts == {"zh": 120, "af": 90, "yo": 150}
    # Long enough for every language to come to its end more than once.
    assert set(islice(stream.train, 6 * len(whole.train))) == set(whole.train)


@pytest.mark.parametrize(
    ("subset", "languages"), [("en-{language}", ["zh", "yo"]), ({"af": "af-en", "zh": "en-zh"}, []), ("af-en", ["af"])]
)
def test_ways_to_name_subsets(opus, subset, languages):
    corpus = hub_corpus(opus, subset=subset, languages=languages)
    assert corpus.languages == (languages or ["af", "zh"])


def test_one_pair_as_of_wmt_with_a_validation_split(tmp_path):
    path = hub_directories.write(tmp_path / "wmt", {"de-en": {"train": 200, "validation": 20}}, shards=2)
    corpus = hub_corpus(path, subset="de-en", languages=["de"], direction="from_english", test_fraction=0.2)
    assert len(corpus.validation) == 20
    assert len(corpus.train) + len(corpus.test) == 200
    assert corpus.test
    assert corpus.train[0].source.startswith("en of de-en, train")
    only = hub_corpus(path, subset=None, languages=["de"])
    assert len(only.validation) == 20


def test_the_most_of_each_split(opus):
    corpus = hub_corpus(opus, max_examples=100, max_held_out=5)
    assert len(corpus.train) + of_split(corpus, "validation")["yo"] + of_split(corpus, "test")["yo"] <= 100
    assert of_split(corpus, "train").keys() == {"zh", "af", "yo"}
    assert max(of_split(corpus, "test").values()) == 5
    assert hub_corpus(opus, max_examples=100, max_held_out=5) == corpus != hub_corpus(opus, max_examples=100, seed=1)


def test_rows_without_text_are_left_out_and_counted(tmp_path, caplog):
    def row(first: str, second: str, split: str, number: int):
        made = hub_directories.translation(first, second, split, number)
        if number % 10 == 0:
            made["translation"][first] = ""
        return made

    path = hub_directories.write(tmp_path / "wmt", {"de-en": {"train": 100}}, row=row)
    with caplog.at_level(logging.WARNING):
        corpus = hub_corpus(path, languages=["de"])
    assert sum(of_split(corpus, split)["de"] for split in ("train", "validation", "test")) == 90
    assert "10 rows without text on one side were left out" in caplog.text
    with pytest.raises(DataError, match=r"field 'translation\.de' is ''"):
        hub_corpus(path, languages=["de"], skip_empty=False)


def test_languages_with_too_few_rows_are_told(tmp_path, caplog):
    path = hub_directories.write(
        tmp_path / "few", {"de-en": {"train": 50, "test": 5}, "en-yo": {"train": 2}, "en-zu": {"train": 1, "test": 2}}
    )
    with caplog.at_level(logging.WARNING):
        hub_corpus(path, languages=["de", "yo", "zu"], validation_fraction=0)
    assert "no test pairs in these languages: yo (2 in all)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": "{language}-en"}, r"no subset 'zh-en'.*; it has af-en, en-yo, en-zh|it has af-en, en-zh, en-yo"),
        ({"languages": ["af", "xx"]}, "no subset 'xx-en' or 'en-xx'"),
        ({"subset": {"af": "af-en"}}, "names no subset for the language 'zh'"),
        ({"subset": None, "languages": ["af"]}, "no data set can be read at"),
        ({"languages": []}, "languages is empty"),
        ({"languages": ["af", "af"]}, "names one twice"),
        ({"target_field": "translation.english"}, r"no field 'translation\.english'.*translation\.zh"),
        ({"language_field": "lang"}, "only one of them can say"),
        ({"streaming": True, "max_examples": 5}, "a stream has no end"),
        ({"streaming": True, "counts": {"xx": 5}}, "counts: 'xx' is none of the languages"),
        ({"path": "/nowhere/at/all"}, r"data\.path: there is no directory /nowhere/at/all \(looked in "),
    ],
)
def test_what_cannot_be_read_is_refused(opus, options, message):
    with pytest.raises(DataError, match=message):
        hub_corpus(**{"path": opus, **options})


@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_rows_name_are_not_opened(tmp_path, streaming):
    """`datasets` would decode a column of images, and so open any file or ask the network."""
    features = datasets.Features({"de": datasets.Value("string"), "en": datasets.Value("string")})
    features |= {"page": datasets.Image(), "pages": datasets.List({"page": datasets.Image()})}
    page = {"bytes": None, "path": str(tmp_path / "absent.png")}
    table = {"de": ["eins", "zwei"], "en": ["one", "two"], "page": [page] * 2, "pages": [[{"page": page}]] * 2}
    (tmp_path / "data").mkdir()
    schema = datasets.Features(features).arrow_schema
    pyarrow.parquet.write_table(pyarrow.table(table, schema), tmp_path / "data" / "train.parquet")
    fields = {"subset": None, "languages": ["de"], "source_field": "de", "target_field": "en"}
    fields |= {"validation_fraction": 0.0, "test_fraction": 0.0}
    corpus = hub_corpus(tmp_path / "data", streaming=streaming, **fields)
    assert {pair.target for pair in islice(corpus.train, 2)} == {"one", "two"}
    if hasattr(datasets, "Json"):  # objects of any form, which are decoded
        rows = datasets.Dataset.from_dict({"a": [{"b": 1}, {"b": None}]}, datasets.Features({"a": datasets.Json()}))
        opened = _opener("here", "train", rows.to_iterable_dataset() if streaming else rows)()
        assert [row for _, row in opened] == [{"a": {"b": 1}}, {"a": {"b": None}}]


def test_numbers_that_nobody_says_are_asked_for(tmp_path):
    path = hub_directories.write(tmp_path / "opus", OPUS, has_counts=False)
    with pytest.raises(DataError, match=r"how often 'zh' is drawn .* counts: {zh: 1000, af: 1000, yo: 1000"):
        hub_corpus(path, streaming=True)
    stream = hub_corpus(path, streaming=True, counts={"zh": 900, "af": 90, "yo": 10}).train
    assert stream.probabilities == pytest.approx({"zh": 0.9, "af": 0.09, "yo": 0.01})


def test_a_data_set_without_training_rows_and_damaged_files(tmp_path):
    path = hub_directories.write(tmp_path / "test", {"de-en": {"test": 20}})
    with pytest.raises(DataError, match="no split 'train'; its splits are test"):
        hub_corpus(path, languages=["de"])
    path = hub_directories.write(tmp_path / "damaged", {"de-en": {"train": 20}})
    next((path / "de-en").iterdir()).write_bytes(b"PAR1 is no file PAR1")
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"cannot be read|can be read"):
            hub_corpus(path, languages=["de"], streaming=streaming)

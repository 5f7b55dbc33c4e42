"""Corpora of local files: every format alike, files by language, directories, streams."""

from __future__ import annotations

import logging
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from hf_gpipe.data import Corpus, StreamedCorpus
from hf_gpipe.data.files import check_files
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from tests.data import test_formats
from tests.data.sections import corpus as build_corpus

CODES = ("de", "fr", "yo")
SIZES = {"de": 300, "fr": 120, "yo": 40}


def rows_of(code: str) -> list[dict[str, str]]:
    # English sentences that recur within a language and in the others.
    return [{"xx": f"{code} {n}", "en": f"sentence {n % 100}", "lang": code} for n in range(SIZES[code])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file a language in each format, and all languages in one."""
    for ending in ("jsonl.gz", "csv", "tsv", "parquet"):
        for code in CODES:
            test_formats.write(tmp_path / f"{code}.{ending}", rows_of(code))
        test_formats.write(tmp_path / f"all.{ending}", [row for code in CODES for row in rows_of(code)])
    for code in CODES:
        for side, field in ((code, "xx"), ("en", "en")):
            lines = "".join(row[field] + "\n" for row in rows_of(code))
            (tmp_path / f"{code}-en.{side}").write_text(lines)
    return tmp_path


def local(folder: Path, ending: str, name: str = "{language}", **options) -> Corpus | StreamedCorpus:
    kind = {"jsonl.gz": "jsonl", "tsv": "csv"}.get(ending, ending)
    fields = {"source_field": "xx", "target_field": "en", "split_by": "target"}
    paths = {"path": str(folder / f"{name}.{ending}")}
    if kind == "parallel":
        paths = {
            "path": str(folder / "{language}-en.{language}"),
            "target_path": str(folder / "{language}-en.en"),
        }
    return build_corpus(kind=kind, **paths, **{"languages": list(CODES), "english": "target", **fields, **options})


ENDINGS = ["jsonl.gz", "csv", "tsv", "parquet", "parallel"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_all_formats_give_the_same_corpus(folder, ending):
    options = {"direction": "both", "validation_fraction": 0.1, "test_fraction": 0.1, "max_held_out": 9}
    assert local(folder, ending, **options) == local(folder, "jsonl.gz", **options)


def test_languages_by_file_and_by_field_are_the_same_corpus(folder):
    by_file = local(folder, "csv", target_tag=True)
    by_field = local(folder, "csv", "all", language_field="lang", target_tag=True)
    assert by_file == by_field
    assert by_file.target_tags == ["<2en>"]
    assert local(folder, "csv", "all", language_field="lang", languages=[]).languages == ["de", "fr", "yo"]


def test_columns_by_language(tmp_path):
    (tmp_path / "x.tsv").write_text("en\tde\tfr\n" + "".join(f"e{n}\td{n}\tf{n}\n" for n in range(50)))
    fields = {"source_field": "en", "target_field": "{language}", "languages": ["de", "fr"]}
    corpus = build_corpus(kind="csv", path=str(tmp_path / "x.tsv"), **fields)
    assert corpus.target_tags == ["<2de>", "<2fr>"]
    assert {pair.source.split("> ")[1][1:] == pair.target[1:] for pair in corpus.train} == {True}
    # One English sentence is in one split, whatever language it is said in.
    assert not {pair.split_key for pair in corpus.train} & {pair.split_key for pair in corpus.test}


def test_a_directory_and_wildcards_are_all_their_files(folder, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, code in enumerate(CODES):
        test_formats.write(shards / f"part-{number}.jsonl", rows_of(code))
    (shards / "README.md").write_text("no data")
    whole = local(folder, "jsonl.gz", "all", language_field="lang")
    for path in (shards, shards / "*.jsonl"):
        options = {"source_field": "xx", "target_field": "en", "split_by": "target", "language_field": "lang"}
        # The other rows know it by the field of the side that is not.
        assert build_corpus(kind="jsonl", path=str(path), english="target", **options) == whole
    with pytest.raises(DataError, match=r"no files with names in \.parquet"):
        build_corpus(kind="parquet", path=str(shards))
    with pytest.raises(DataError, match=r"no file matches .*\.json0"):
        build_corpus(kind="jsonl", path=str(shards / "*.json0"))


def test_line_aligned_files_of_one_language(folder):
    paths = {"path": str(folder / "de-en.de"), "target_path": str(folder / "de-en.en")}
    assert build_corpus(kind="parallel", **paths).languages == ["all"]
    named = build_corpus(kind="parallel", **paths, languages=["de"], direction="from_english", english="target")
    assert named.languages == ["de"]
    assert named.train[0].target.startswith("de ")
    paths["target_path"] = str(folder / "*-en.en")
    with pytest.raises(DataError, match=r"data\.path names 1 files and data\.target_path 3"):
        build_corpus(kind="parallel", **paths)


def test_lines_without_a_translation_are_left_out(tmp_path, caplog):
    (tmp_path / "x.de").write_text("eins\n\ndrei\n" * 20)
    (tmp_path / "x.en").write_text("one\ntwo\nthree\n" * 20)
    paths = {"path": str(tmp_path / "x.de"), "target_path": str(tmp_path / "x.en")}
    with caplog.at_level(logging.WARNING):
        corpus = build_corpus(kind="parallel", **paths, validation_fraction=0, test_fraction=0)
    assert len(corpus.train) == 40
    assert "20 rows without text on one side were left out" in caplog.text
    with pytest.raises(DataError, match=r"x\.de, line 2: field 'source' is ''"):
        build_corpus(kind="parallel", **paths, skip_empty=False)


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_stream_is_the_corpus_in_another_order(folder, ending):
    options = {"validation_fraction": 0.1, "test_fraction": 0.1, "direction": "both"}
    whole = local(folder, ending, **options)
    stream = local(folder, ending, **options, streaming=True, counts=SIZES, shuffle_buffer=50)
    assert (stream.validation, stream.test, stream.languages, stream.target_tags) == (
        whole.validation,
        whole.test,
        whole.languages,
        whole.target_tags,
    )
    pairs = list(islice(stream.train, 5 * len(whole.train)))
    assert set(pairs) == set(whole.train)
    held_out = {pair.split_key for pair in (*whole.validation, *whole.test)}
    assert not held_out & {pair.split_key for pair in pairs}
    assert list(stream.texts(10)) == [text for pair in pairs[:10] for text in (pair.source, pair.target)]


def test_temperature_brings_languages_together(folder):
    def shares(temperature: float) -> dict[str, float]:
        stream = local(folder, "parquet", streaming=True, temperature=temperature).train
        found = Counter(pair.language for pair in islice(stream, 3000))
        assert {code: found[code] / 3000 for code in CODES} == pytest.approx(stream.probabilities, abs=0.04)
        return stream.probabilities

    assert shares(1.0) == pytest.approx({code: SIZES[code] / 460 for code in CODES})
    assert max(shares(100.0).values()) < 0.35


def test_mixed_languages_are_streamed_as_they_come(folder):
    options = {"language_field": "lang", "streaming": True, "max_held_out": 3}
    corpus = local(folder, "csv", "all", languages=["fr", "de"], **options)
    assert {pair.language for pair in islice(corpus.train, 2000)} == {"de", "fr"}
    assert Counter(pair.language for pair in corpus.test) == {"de": 3, "fr": 3}
    with pytest.raises(DataError, match=r"temperature is 5, and the languages of .* are mixed in its rows"):
        local(folder, "csv", "all", temperature=5, **options)
    with pytest.raises(DataError, match="languages is empty; a stream does not tell"):
        local(folder, "csv", "all", languages=[], **options)


def test_a_stream_without_training_pairs_ends_with_a_word(tmp_path):
    (tmp_path / "x.jsonl").write_text("")
    corpus = build_corpus(kind="jsonl", path=str(tmp_path / "x.jsonl"), streaming=True)
    with pytest.raises(DataError, match="no pairs to train on"):
        next(iter(corpus.train))


# ---------------------------------------------------------------------- before anything starts


@pytest.mark.parametrize(
    ("kind", "path", "target_path", "message"),
    [
        ("csv", "missing.csv", None, r"data\.path: there is no file .*missing\.csv \(missing\.csv does not exist"),
        ("jsonl", "{language}.jsonl.gz", None, r"xx\.jsonl\.gz does not exist"),
        ("parallel", "de-en.de", "missing", r"data\.target_path: there is no file .*missing"),
        ("parallel", "de-en.de", None, "target_path is missing and kind is parallel"),
        ("parallel", ".", "de-en.en", "cannot be read: it is not known which of its files to read; name the file"),
        ("hub", "missing", None, "there is no directory .*missing"),
    ],
)
def test_missing_files_are_told_before_reading(folder, kind, path, target_path, message):
    with pytest.raises(DataError, match=message):
        check_files(
            DataSection(
                kind=kind,
                path=str(folder / path),
                target_path=target_path and str(folder / target_path),
                languages=["de", "xx"],
            )
        )


def test_files_that_are_there_are_not_read(folder):
    (folder / "de.jsonl.gz").write_text("not gzip")
    check_files(DataSection(kind="jsonl", path=str(folder / "{language}.jsonl.gz"), languages=["de", "fr"]))
    check_files(DataSection(kind="hub", path="owner/name"))
    check_files(DataSection(kind="jsonl", path=str(folder)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"languages": []}, "languages is empty, and a path, subset or field has {language} in it"),
        ({"languages": ["de"], "language_field": "lang"}, "only one of them can say"),
        ({"direction": "both", "english": None}, "no field tells which side is English"),
        ({"streaming": True}, re.escape("counts: {de: 1000, fr: 1000, yo: 1000, ...}")),
        ({"source_field": "nothing"}, r"de\.csv, line 2: no field 'nothing'; the fields found are xx, en, lang"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(folder, options, message):
    with pytest.raises(DataError, match=message):
        local(folder, "csv", **options)

"""Prepared data is found again as long as nothing that it depends on has changed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from hf_gpipe.checkpoint import digests
from hf_gpipe.data import TokenizedPairs, prepared, train_tokenizer
from hf_gpipe.data.tokenizer import identity_of_tokenizer, trained_tokenizer
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import TokenizerSection
from hf_gpipe.tasks.translation import tokenized
from hf_gpipe.tasks.translation.pairs import PairTable
from hf_gpipe.tasks.translation.sources import FileRows
from tests.data import hub_directories
from tests.data.sections import corpus

LIMITS = {"max_source_tokens": 30, "max_target_tokens": 30}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "hf_gpipe"


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def write(path: Path, word: str = "Satz", count: int = 2500) -> Path:
    lines = [{"source": f"{word} {n}", "target": f"sentence {n}", "lang": ("de", "fr")[n % 2]} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def no_reading(monkeypatch):
    def stop(self):
        raise AssertionError("a file is read")

    return lambda: monkeypatch.setattr(FileRows, "__iter__", stop)


def test_pairs_are_read_once(tmp_path, cache, no_reading):
    options = {"kind": "jsonl", "path": str(write(tmp_path / "x.jsonl")), "language_field": "lang"}
    first = corpus(**options)
    assert len(entries(cache)) == 1
    no_reading()
    again = corpus(**options)
    assert again == first
    assert again.train.fingerprint == first.train.fingerprint
    # How pairs are mixed, and how long they may be, is not what they are.
    assert corpus(**options, temperature=5.0, max_source_tokens=9).train == first.train
    with pytest.raises(AssertionError, match="a file is read"):
        corpus(**options, split_by="target")


def test_other_content_is_read_again(tmp_path, cache):
    path = write(tmp_path / "x.jsonl", "Satz")
    assert corpus(kind="jsonl", path=str(path)).train[0].source.startswith("Satz")
    # Of the same length, at the same time.
    write(path, "Wort")
    assert corpus(kind="jsonl", path=str(path)).train[0].source.startswith("Wort")
    assert len(entries(cache)) == 2


def test_a_large_file_is_identified_by_its_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_HASHED_BYTES", 10)
    path = write(tmp_path / "x.jsonl")
    before = prepared.identity_of(path)
    assert prepared.identity_of(path) == before
    path.write_text(path.read_text() + " ")
    assert prepared.identity_of(path) != before


def test_warnings_are_told_each_time(tmp_path, caplog):
    (tmp_path / "x.de").write_text("eins\n\ndrei\n" * 20)
    (tmp_path / "x.en").write_text("one\ntwo\nthree\n" * 20)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            corpus(kind="parallel", path=str(tmp_path / "x.de"), target_path=str(tmp_path / "x.en"))
        assert "20 rows without text on one side were left out" in caplog.text


def test_a_data_set_of_the_hub_is_found_again(tmp_path, cache):
    path = hub_directories.write(tmp_path / "hub", {"de-en": {"train": 60, "test": 4}})
    options = {"source_field": "translation.de", "target_field": "translation.en", "languages": ["de"]}
    assert corpus(kind="hub", path=str(path), **options) == corpus(kind="hub", path=str(path), **options)
    assert len(entries(cache)) == 1


def test_a_corpus_that_cannot_be_read_leaves_nothing(tmp_path, cache):
    (tmp_path / "x.jsonl").write_text('{"source": "a", "target": "b"}\n{')
    for _ in range(2):
        with pytest.raises(DataError, match="line 2 is not JSON"):
            corpus(kind="jsonl", path=str(tmp_path / "x.jsonl"))
    assert entries(cache) == []


def test_the_slower_of_two_processes_takes_what_the_other_has_made(cache):
    def write_and_be_late(folder: Path) -> None:
        (folder / "a").write_text("mine")
        made = prepared.cached("x", "key", lambda other: (other / "a").write_text("theirs") and None)
        assert made.is_dir()

    folder = prepared.cached("x", "key", write_and_be_late)
    assert (folder / "a").read_text() == "theirs"
    assert entries(cache) == ["x-key"]


def test_an_entry_can_be_read_by_whom_the_umask_allows(cache):
    before = os.umask(0o022)
    try:
        entry = prepared.cached("x", "key", lambda folder: (folder / "a").write_text("") and None)
    finally:
        os.umask(before)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in entry.iterdir()} == {0o644}


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(DataError, match=r"cache directory .* cannot be written .* set HF_DATASETS_CACHE"):
        corpus(kind="jsonl", path=str(write(tmp_path / "x.jsonl")))


def test_a_table_of_pairs_is_a_sequence(tmp_path):
    pairs = corpus(kind="jsonl", path=str(write(tmp_path / "x.jsonl"))).train
    assert isinstance(pairs, PairTable)
    listed = list(pairs)
    assert len(pairs) == len(listed) > 2000, "of several blocks"
    assert [pairs[0], pairs[1500], pairs[-1]] == [listed[0], listed[1500], listed[-1]]
    assert pairs[998:1003] == listed[998:1003]
    assert pairs == listed
    assert pairs != listed[1:]
    with pytest.raises(IndexError):
        pairs[len(pairs)]


# ---------------------------------------------------------------------- damage


def damaged_in_every_way(file: Path) -> list[bytes | None]:
    """Contents of a file that was damaged: emptied, cut, garbled, exchanged for nonsense, or lost."""
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return [b"", content[:middle], content[:-1], flipped, b"\xff\xfe" + content, b"[" * 5000, b"{}", None]


def test_a_damaged_entry_is_made_again_with_one_line(tmp_path, cache, caplog):
    """Of pairs, a tokenizer and tokens: every file of each, damaged in every way."""
    path = write(tmp_path / "x.jsonl", count=60)
    section = TokenizerSection(vocab_size=280)

    def prepare() -> tuple[Any, Any, Any]:
        found = corpus(kind="jsonl", path=str(path))
        tokenizer = trained_tokenizer(found, section)
        rows = TokenizedPairs(found.train, tokenizer, **LIMITS)
        return list(found.train), tokenizer.get_vocab(), [rows[index] for index in range(len(rows))]

    first = prepare()
    names = entries(cache)
    assert {name.partition("-")[0] for name in names} == {"pairs", "tokenizer", "tokens"}
    num_damaged = 0
    for file in sorted(path for path in cache.rglob("*") if path.is_file()):
        ways = damaged_in_every_way(file)
        # A tokenizer takes a second to train.
        for content in ways if "tokenizer-" not in str(file) else ways[1:2]:
            file.unlink() if content is None else file.write_bytes(content)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert prepare() == first
            said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
            assert len(said) == 1, (file, content, said)
            assert str(file.parent) in said[0]
            num_damaged += 1
    assert num_damaged > 60
    assert entries(cache) == names, "nothing is left of the damaged ones"
    caplog.clear()
    prepare()
    assert not caplog.records


def test_a_file_that_does_not_belong_to_an_entry_is_damage(cache):
    entry = prepared.cached("x", "key", lambda folder: (folder / "a").write_text("1") and None)
    assert prepared.damage(entry) is None
    (entry / "b").symlink_to("/etc/passwd")
    assert "does not belong there" in prepared.damage(entry)
    prepared.cached("x", "key", lambda folder: (folder / "a").write_text("2") and None)
    assert sorted(path.name for path in entry.iterdir()) == ["a", digests.DIGESTS_FILE]
    assert (entry / "a").read_text() == "2"


def test_entries_of_older_versions_and_other_things_in_their_place_are_made_again(cache):
    def make() -> Path:
        return prepared.cached("x", "key", lambda folder: (folder / "a").write_text("new") and None)

    entry = make()
    (entry / digests.DIGESTS_FILE).unlink()
    assert (make() / digests.DIGESTS_FILE).is_file()
    shutil.rmtree(entry)
    entry.write_text("a file")
    assert (make() / "a").read_text() == "new"
    shutil.rmtree(entry)
    entry.symlink_to(cache / "nowhere")
    assert (make() / "a").read_text() == "new"
    assert entries(cache) == ["x-key"]


def test_a_process_that_is_slower_at_mending_takes_what_the_other_has_made(cache):
    entry = prepared.cached("x", "key", lambda folder: (folder / "a").write_text("1") and None)
    (entry / "a").write_text("damaged")

    def write_and_be_late(folder: Path) -> None:
        (folder / "a").write_text("mine")
        prepared.cached("x", "key", lambda other: (other / "a").write_text("theirs") and None)

    assert (prepared.cached("x", "key", write_and_be_late) / "a").read_text() == "theirs"
    assert entries(cache) == ["x-key"]


# ---------------------------------------------------------------------- tokenizers and tokens


def test_pairs_are_tokenized_once(tmp_path, cache, monkeypatch):
    found = corpus(kind="jsonl", path=str(write(tmp_path / "x.jsonl")), language_field="lang")
    tokenizer = train_tokenizer(found.texts(), 280, tmp_path / "a")
    in_memory = TokenizedPairs(list(found.train), tokenizer, **LIMITS)
    first = TokenizedPairs(found.train, tokenizer, **LIMITS)
    assert [first[index] for index in range(len(first))] == [in_memory[index] for index in range(len(first))]
    assert (first.lengths, first.languages) == (in_memory.lengths, in_memory.languages)
    num_entries = len(entries(cache))

    def stop(*args, **options):
        raise AssertionError("pairs are tokenized")
        yield

    monkeypatch.setattr(tokenized._Tokenize, "batches", stop)
    again = TokenizedPairs(found.train, AutoTokenizer.from_pretrained(tmp_path / "a"), **LIMITS)
    assert [again[index] for index in range(9)] == [first[index] for index in range(9)]
    assert len(entries(cache)) == num_entries
    other = train_tokenizer(found.texts(), 280, tmp_path / "b", model="bpe")
    for tokenizer_, limits in ((other, LIMITS), (tokenizer, {**LIMITS, "max_target_tokens": 5})):
        with pytest.raises(AssertionError, match="pairs are tokenized"):
            TokenizedPairs(found.train, tokenizer_, **limits)


def test_a_tokenizer_is_the_same_wherever_it_lies_and_whatever_it_has_read(tmp_path):
    tokenizer = train_tokenizer([f"number {n}" for n in range(300)], 277, tmp_path / "a")
    before = identity_of_tokenizer(tokenizer)
    tokenizer("number " * 50, truncation=True, max_length=5)
    tokenizer(["number", "number 1"], padding=True)
    assert identity_of_tokenizer(tokenizer) == before
    for name in ("b", "c"):
        AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / name)
        assert identity_of_tokenizer(AutoTokenizer.from_pretrained(tmp_path / name)) == before
    tokenizer.add_tokens(["another"])
    assert identity_of_tokenizer(tokenizer) != before


def test_a_tokenizer_is_trained_once(tmp_path, monkeypatch):
    found = corpus(kind="jsonl", path=str(write(tmp_path / "x.jsonl")))
    section = TokenizerSection(vocab_size=280)
    first = trained_tokenizer(found, section)
    monkeypatch.setattr("hf_gpipe.data.tokenizer._run_trainer", lambda *_: "it is trained")
    again = trained_tokenizer(found, section)
    assert again("Satz 7").input_ids == first("Satz 7").input_ids
    again.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == first.get_vocab()
    with pytest.raises(DataError, match="it is trained"):
        trained_tokenizer(found, TokenizerSection(vocab_size=280, model="bpe"))
